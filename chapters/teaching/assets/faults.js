// What is cut off on a deck's slides, each with its number: every setting of a picture that can be moved.
() => Reveal.getSlides().flatMap((slide, number) => {
  const { h, v } = Reveal.getIndices(slide);
  Reveal.slide(h, v);
  const whole = Reveal.getViewportElement().getBoundingClientRect();
  const frames = [...slide.querySelectorAll(".frame")];
  const first = frames.findIndex((frame) => !frame.hidden);
  const found = [];
  for (const frame of frames.length ? frames : [null]) {
    frames.forEach((other) => { other.hidden = other !== frame; });
    for (const part of slide.querySelectorAll(":not(aside, aside *)")) {
      const box = part.getBoundingClientRect();
      const outside = Math.max(box.right - whole.right, whole.left - box.left, box.bottom - whole.bottom, whole.top - box.top);
      const hidden = part.matches("pre, .scroll, .formula") && part.scrollWidth - part.clientWidth;
      if ((box.width && outside > 1) || hidden > 1) {
        found.push(`slide ${number + 1}: ${part.tagName} holds too much: ${part.textContent.trim().slice(0, 60)}`);
        break;
      }
    }
  }
  frames.forEach((frame, at) => { frame.hidden = at !== first; });
  return found;
})
