// Draws the page's figures, and again where light turns to dark: colours are names of page.css's variables.
"use strict";
const dark = matchMedia("(prefers-color-scheme: dark)");
const touched = matchMedia("(pointer: coarse)");
const plots = [...document.querySelectorAll(".picture")].map((place) => {
  const script = place.querySelector("script");
  const figure = JSON.parse(script.textContent);
  script.remove();
  return { place, figure };
});

function painted(value, colours) {
  if (typeof value === "string") {
    const name = /^var\((--[\w-]+)\)$/.exec(value);
    return name ? colours.getPropertyValue(name[1]).trim() : value;
  }
  if (Array.isArray(value)) return value.map((each) => painted(each, colours));
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, painted(each, colours)]));
}

function draw() {
  const colours = getComputedStyle(document.documentElement);
  for (const { place, figure } of plots) {
    const { data, layout } = painted(figure, colours);
    // A finger that drags scrolls the page.
    Plotly.react(place, data, { dragmode: touched.matches ? false : "zoom", ...layout }, {
      responsive: true,
      displayModeBar: touched.matches ? false : "hover",
      displaylogo: false,
      // By name: plotly has one that shares a chart on a server.
      modeBarButtons: [layout.xaxis ? ["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"] : ["toImage"]],
    });
  }
}

draw();
dark.addEventListener("change", draw);
