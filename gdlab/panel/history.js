// The runs so far, one a line: which are drawn, what differs between them, and what came out.
export default {
  initialize: hello,
  render({ model, el }) {
    const box = document.createElement("div");
    box.className = "gd-history";
    box.dataset.lmSuppressShortcuts = "true";
    el.append(box);
    const cell = (tag, content) => {
      const node = document.createElement(tag);
      node.append(content);
      return node;
    };
    const small = (label, title, message) => {
      const node = cell("button", label);
      node.type = "button";
      node.title = title;
      node.setAttribute("aria-label", title);
      node.className = "gd-small";
      node.onclick = () => model.send(message);
      return node;
    };
    const line = (run) => {
      const tick = document.createElement("input");
      tick.type = "checkbox";
      tick.checked = run.shown;
      tick.setAttribute("aria-label", `Draw ${run.name}`);
      tick.onchange = () => model.send({ show: run.id, on: tick.checked });
      const swatch = document.createElement("span");
      swatch.className = "gd-swatch";
      swatch.style.background = run.color;
      const name = cell("th", swatch);
      name.scope = "row";
      name.append(run.name);
      const node = document.createElement("tr");
      node.dataset.run = run.id;
      const tools = cell("td", small("use", `Use the settings of ${run.name}`, { use: run.id }));
      tools.append(small("×", `Forget ${run.name}`, { forget: run.id }));
      node.append(cell("td", tick), name, ...run.cells.map((text) => cell("td", text)), tools);
      return node;
    };
    const draw = () => {
      const runs = model.get("runs");
      box.hidden = runs.length === 0;
      const focused = box.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
      const table = document.createElement("table");
      const caption = cell("caption", "Runs so far");
      const head = document.createElement("tr");
      for (const title of ["Draw", "Run", ...model.get("columns"), ""]) {
        const node = cell("th", title);
        node.scope = "col";
        node.title = model.get("titles")[title] ?? "";
        head.append(node);
      }
      table.append(caption, cell("thead", head));
      const body = document.createElement("tbody");
      body.append(...runs.map(line));
      table.append(body);
      box.replaceChildren(table);
      if (focused) box.querySelector(`[aria-label="${CSS.escape(focused)}"]`)?.focus();
    };
    model.on("change:runs", draw);
    draw();
    return () => model.off("change:runs", draw);
  },
};
