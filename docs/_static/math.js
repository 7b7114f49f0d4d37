// Render the equations of a page, which Sphinx encloses in \( \) and \[ \].
document.addEventListener("DOMContentLoaded", () => {
  for (const element of document.querySelectorAll(".math")) {
    const text = element.lastChild;
    const rendered = document.createElement("span");
    katex.render(text.textContent.trim().slice(2, -2), rendered, {
      displayMode: element.tagName === "DIV",
      throwOnError: false,
    });
    text.replaceWith(rendered);
  }
});
