// What leaves the page: a link to these settings, and files of the last run.
const save = (name, blob) => {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
};

// The address under which Voila shows this notebook; in JupyterLab the notebook's own path is known to the address bar.
const page = (path) => {
  const here = new URL(location.href);
  const settings = document.getElementById("jupyter-config-data");
  const base = settings ? (JSON.parse(settings.textContent).baseUrl ?? "/") : "/";
  const inLab = here.pathname.match(/\/(?:lab|doc)(?:\/workspaces\/[^/]+)?(?:\/tree\/(.*))?$/) ??
    here.pathname.match(/\/notebooks\/(.*)$/);
  if (inLab) return `${here.origin}${base}voila/render/${inLab[1] ?? path}`;
  return here.origin + here.pathname;
};

export default {
  initialize: hello,
  render({ model, el }) {
    const box = document.createElement("div");
    box.className = "gd-export";
    box.dataset.lmSuppressShortcuts = "true";
    const shown = document.createElement("input");
    shown.readOnly = true;
    shown.hidden = true;
    shown.setAttribute("aria-label", "Link to these settings");
    const note = document.createElement("span");
    note.setAttribute("role", "status");

    const button = (label, title, action) => {
      const node = document.createElement("button");
      node.type = "button";
      node.className = "gd-button";
      node.textContent = label;
      node.title = title;
      node.onclick = action;
      box.append(node);
      return node;
    };
    let asked_ms = 0;
    const copy = async () => {
      const link = `${page(model.get("path"))}?${model.get("query")}`;
      shown.value = link;
      shown.hidden = false;
      shown.select();
      try {
        await navigator.clipboard.writeText(link);
        note.textContent = "Link copied.";
      } catch {
        note.textContent = "Copy the link from the box.";
      }
    };
    const picture = async () => {
      const panel = box.closest(".gd-panel") ?? document;
      for (const [index, plot] of [...panel.querySelectorAll(".js-plotly-plot")].entries()) {
        const data = await globalThis.Plotly.toImage(plot, { format: "png", scale: 2 });
        save(`${model.get("name")}-${index + 1}.png`, await (await fetch(data)).blob());
      }
    };
    button("Copy link", "A link that opens these settings", () => ((asked_ms = Date.now()), copy()));
    const files = [
      button("CSV", "Every push of the last run as a table", () => model.send({ make: "csv" })),
      button("Parquet", "Every push of the last run, typed and small", () => model.send({ make: "parquet" })),
      button("HTML", "The figures as one page that needs nothing else", () => model.send({ make: "html" })),
      button("PNG", "The figures as pictures", picture),
    ];
    box.append(note, shown);
    el.append(box);

    const draw = () => {
      for (const node of files) node.disabled = !model.get("ready");
    };
    const receive = (message, buffers) => {
      if (message.file) save(message.file, new Blob([buffers[0]], { type: message.type }));
      note.textContent = message.note ?? "";
    };
    // A knob turned just before may arrive just after: then the link is copied once more.
    const stale = () => (Date.now() - asked_ms < 1000 ? copy() : (shown.hidden = true));
    model.on("change:ready", draw);
    model.on("change:query", stale);
    model.on("msg:custom", receive);
    draw();
    return () => {
      model.off("change:ready", draw);
      model.off("change:query", stale);
      model.off("msg:custom", receive);
    };
  },
};
