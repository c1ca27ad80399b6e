// Runs in a page that has mermaid: its drawing, reduced to shapes and words with classes that course.css gives colours.

async source => {
  document.body.innerHTML = (await mermaid.render("drawing", source)).svg;
  const svg = document.querySelector("svg"), toSvg = svg.getScreenCTM().inverse();
  const GEOMETRY = ["x", "y", "width", "height", "cx", "cy", "r", "x1", "y1", "x2", "y2", "d"];
  const round = text => String(text).replace(/-?[\d.]+(e-?\d+)?/g, number => Math.round(number * 10) / 10);

  function shape(element, name) {
    const at = toSvg.multiply(element.getScreenCTM());
    const moved = ` transform="translate(${round(at.e)} ${round(at.f)})"`.replace(' transform="translate(0 0)"', "");
    const kept = GEOMETRY.filter(each => element.hasAttribute(each));
    const numbers = kept.map(each => ` ${each}="${round(element.getAttribute(each))}"`).join("");
    return `<${element.tagName} class="${name}"${numbers}${moved}/>\n`;
  }
  function tip(wire) {
    const length = wire.getTotalLength(), [before, end] = [length - 2, length].map(at => wire.getPointAtLength(at));
    const angle = Math.atan2(end.y - before.y, end.x - before.x) * 180 / Math.PI;
    const reach = wire.matches(".transition") ? 0 : 4; // the others leave room for the tip
    const turned = round(`translate(${end.x} ${end.y}) rotate(${angle})`);
    return `<path class="tip" d="M${reach} 0l-8 -4v8z" transform="${turned}"/>\n`;
  }
  function middle(element) {
    const { x, y, width, height } = element.getBoundingClientRect();
    return new DOMPoint(x + width / 2, y + height / 2).matrixTransform(toSvg);
  }

  let wires = "", boxes = "", words = "";
  for (const element of svg.querySelectorAll("rect, circle, line, path, text")) {
    const node = element.closest(".node, [data-type=participant]"), { width, height } = element.getBBox();
    if ((!width && !height) || element.matches("defs *, marker *")) continue;
    if (element.matches(".background")) boxes += node ? "" : shape(element, "under"); // a label lies on its wire
    else if (element.matches("text")) {
      const lines = [...element.querySelectorAll(".row, tspan[dy]")].filter(line => line.textContent);
      for (const line of lines.length ? lines : [element]) {
        const text = new XMLSerializer().serializeToString(new Text(line.textContent.trim()));
        const x = round(middle(node ?? line).x), y = round(middle(line).y - (line.matches(".messageText") ? 4 : 0));
        words += `<text class="${node ? "name" : "label"}" x="${x}" y="${y}">${text}</text>\n`;
      }
    } else if (element.matches("[marker-end]")) {
      const dashed = parseFloat(getComputedStyle(element).strokeDasharray) > 0 ? " dashed" : "";
      wires += shape(element, `wire${dashed}`) + tip(element);
    } else if (element.matches(".actor-line")) wires += shape(element, "wire dashed");
    else if (element.matches(".state-start")) boxes += shape(element, "dot");
    else if (node?.id.includes("root_end")) { // a ring of many small curves
      if (element !== node.querySelector("path")) continue;
      boxes += `<circle class="dot" r="7" cx="${round(middle(node).x)}" cy="${round(middle(node).y)}"/>\n`;
    } else if (node) boxes += shape(element, "box");
  }
  const { x, y, width, height } = svg.viewBox.baseVal, view = round(`${x} ${y} ${width} ${height}`);
  const size = `width="${Math.round(width)}" height="${Math.round(height)}"`;
  return `<svg ${size} viewBox="${view}">\n${wires}${boxes}${words}</svg>`;
}
