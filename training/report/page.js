"use strict";
// Shows the values next to the pointer; without this script the page lacks nothing else.
for (const figure of document.querySelectorAll("figure[data-curves]")) {
  const curves = JSON.parse(figure.dataset.curves);
  const svg = figure.querySelector("svg");
  const [line, tip] = ["at", "tip"].map((name) => {
    const box = figure.appendChild(document.createElement("div"));
    box.className = name;
    box.hidden = true;
    return box;
  });
  const hide = () => { line.hidden = tip.hidden = true; };
  const show = (event) => {
    const { width } = svg.viewBox.baseVal, box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) * width) / box.width;
    const near = curves.map(([color, name, spots]) => {
      const spot = spots.reduce((one, two) => (Math.abs(two[0] - x) < Math.abs(one[0] - x) ? two : one));
      return { color, name, x: spot[0], text: spot[2] };
    });
    const nearest = near.reduce((one, two) => (Math.abs(two.x - x) < Math.abs(one.x - x) ? two : one));
    const left = (nearest.x * box.width) / width;
    tip.replaceChildren(...near.map(({ color, name, text }) => {
      const row = document.createElement("div");
      const words = row.appendChild(document.createElement("span"));
      row.style.borderColor = color;
      words.textContent = name ? `${name}: ${text}` : text;
      return row;
    }));
    line.hidden = tip.hidden = false;
    line.style.left = `${left}px`;
    tip.style.top = "2rem";
    tip.style.left = left > box.width / 2 ? "auto" : `${left + 10}px`;
    tip.style.right = left > box.width / 2 ? `${box.width - left + 10}px` : "auto";
  };
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerdown", show);
  svg.addEventListener("pointerleave", hide);
}
