// What is cut off on a deck's slides or a handout's pages, each with its number. deck.js has made letters smaller where it
// could; it stops before they are too small for the back row.
() => [...document.querySelectorAll(".slide, .sheet")].flatMap((slide, at) => {
  const frames = [...slide.querySelectorAll(".frame")];
  const first = frames.findIndex((frame) => !frame.hidden);
  const found = [];
  for (const frame of frames.length ? frames : [null]) { // every setting of a picture that can be moved
    frames.forEach((other) => { other.hidden = other !== frame; });
    const whole = slide.getBoundingClientRect();
    for (const part of slide.querySelectorAll(".body, .body *:not(svg *), svg:not(.halves svg) text")) {
      const box = part.getBoundingClientRect();
      const outside = Math.max(box.right - whole.right, whole.left - box.left, box.bottom - whole.bottom, whole.top - box.top);
      const hidden = Math.max(part.scrollWidth - part.clientWidth, part.scrollHeight - part.clientHeight);
      if ((box.width && outside > 1) || (part.matches(".body, pre, .scroll") && hidden > 1)) {
        found.push(`${at + 1}: ${part.tagName} holds too much: ${part.textContent.trim().slice(0, 60)}`);
      }
    }
  }
  frames.forEach((frame, number) => { frame.hidden = number !== first; });
  return found;
})
