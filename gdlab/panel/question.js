// The pieces of a lesson: a prediction that locks, what happened beside it, a question that is graded, how far one is.

let count = 0;

// Words between backticks are code.
const words = (text) => text.split("`").map((part, at) => (at % 2 ? make("code", {}, part) : part));

// Where a value lies between the bounds, 0 to 1; on a logarithmic scale where they are far apart.
const scaleOf = ({ low, high }) => {
  const log = low > 0 && high / low >= 100;
  const [from, to] = log ? [Math.log(low), Math.log(high)] : [low, high];
  return {
    share: (value) => Math.min(1, Math.max(0, ((log ? Math.log(value) : value) - from) / (to - from))),
    value: (share) => {
      const raw = from + share * (to - from);
      return Number((log ? Math.exp(raw) : raw).toPrecision(3));
    },
  };
};

// What a reader answers with: returns the node, how to read it, and how to show a locked answer.
const choice = (view, name) => {
  const box = make("div", { class: "gd-options" });
  for (const option of view.options)
    box.append(make("label", {}, make("input", { type: "radio", name, value: option }), make("span", {}, ...words(option))));
  return {
    nodes: [box],
    read: () => box.querySelector("input:checked")?.value ?? "",
    show: (value) => box.querySelectorAll("input").forEach((input) => (input.checked = input.value === value)),
  };
};

const field = (view, label) => {
  const bounded = Number.isFinite(view.low) && Number.isFinite(view.high);
  const text = make("input", { type: "text", inputmode: "decimal", autocomplete: "off", spellcheck: "false",
    "aria-label": label, size: 12, placeholder: bounded ? `${view.low} to ${view.high}` : null });
  const unit = view.unit ? make("span", { class: "gd-unit" }, view.unit) : "";
  return { nodes: [text, unit], read: () => text.value, show: (value) => (text.value = String(value)) };
};

// A range is drawn with two sliders on one track; each end can be typed as well. It starts empty: nothing is suggested.
const range = (view) => {
  const scale = scaleOf(view);
  const band = make("div", { class: "gd-band" });
  const ends = [["Least", 0], ["Most", 1]].map(([label, share]) => {
    const text = field({}, `${label} that you expect`);
    const slider = make("input", { type: "range", min: 0, max: 1000, "aria-label": `${label} that you expect, slider` });
    slider.value = 1000 * share;
    return { label, text, slider };
  });
  const draw = () => {
    const [from, to] = ends.map(({ slider }) => slider.value / 10).sort((a, b) => a - b);
    band.hidden = ends.every(({ text }) => !text.read());
    Object.assign(band.style, { left: `${from}%`, width: `${to - from}%` });
    for (const { slider, text } of ends) slider.setAttribute("aria-valuetext", `${text.read()} ${view.unit}`);
  };
  for (const { text, slider } of ends) {
    slider.addEventListener("input", () => {
      for (const end of ends) if (end.slider === slider || !end.text.read()) end.text.show(scale.value(end.slider.value / 1000));
      draw();
    });
    text.nodes[0].addEventListener("change", () => ((slider.value = 1000 * scale.share(Number(text.read()))), draw()));
  }
  draw();
  const bounds = make("div", { class: "gd-bounds" }, make("span", {}, String(view.low)), make("span", {}, `${view.high} ${view.unit}`));
  const typed = ends.map(({ label, text }) => make("label", {}, `${label.toLowerCase()} `, text.nodes[0]));
  return {
    nodes: [make("div", { class: "gd-track" }, band, ...ends.map(({ slider }) => slider)), bounds,
      make("div", { class: "gd-typed" }, ...typed, view.unit ? make("span", { class: "gd-unit" }, view.unit) : "")],
    read: () => ends.map(({ text }) => text.read()),
    show: (value) => (ends.forEach(({ text, slider }, at) => {
      text.show(value[at]);
      slider.value = 1000 * scale.share(value[at]);
    }), draw()),
  };
};

const question = (model) => {
  const first = model.get("view");
  const predicts = first.mode === "predict";
  const name = `gd-question-${(count += 1)}`;
  const answer = { choice, range, number: (view) => field(view, view.question) }[first.kind](first, name);
  const button = make("button", { type: "submit", class: "gd-button" }, predicts ? "Commit" : "Check");
  const form = make("form", { "aria-labelledby": `${name}-legend`,
    onsubmit: (event) => (event.preventDefault(), model.send({ take: answer.read() })) },
    make("fieldset", {}, make("legend", { id: `${name}-legend` }, make("b", {}, predicts ? "Predict " : "Check "),
      ...words(first.question)), make("div", { class: `gd-answer gd-${first.kind}` }, ...answer.nodes), button));
  const fieldset = form.firstChild;
  // Notebooks keep Enter to themselves, so the form does not wait for the browser to send it.
  form.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !event.target.matches("input")) return;
    event.preventDefault();
    event.stopPropagation();
    form.requestSubmit();
  });
  return {
    nodes: [form],
    draw: (view) => {
      fieldset.disabled = Boolean(view.locked);
      button.textContent = view.locked ? "Committed" : predicts ? "Commit" : "Check";
      if (view.locked) answer.show(view.value);
    },
  };
};

// The prediction and what happened on one line, where both are numbers.
const comparison = () => {
  const because = make("p", { class: "gd-because" });
  const line = make("div", { class: "gd-track gd-result", "aria-hidden": "true" });
  return {
    nodes: [line, because],
    draw: (view) => {
      because.replaceChildren(...words(view.because ?? ""));
      because.hidden = !view.because;
      line.hidden = !(view.low < view.high && Number.isFinite(view.actual) && view.kind !== "choice");
      if (line.hidden) return;
      const scale = scaleOf(view);
      const at = (value) => `${100 * scale.share(value)}%`;
      const [from, to] = Array.isArray(view.said) ? view.said : [view.said, view.said];
      const band = make("div", { class: "gd-band" }, make("span", {}, "you"));
      Object.assign(band.style, { left: at(from), width: `max(3px, ${100 * (scale.share(to) - scale.share(from))}%)` });
      const mark = make("div", { class: "gd-mark" }, make("span", {}, "what happened"));
      mark.style.left = at(view.actual);
      line.replaceChildren(band, mark);
    },
  };
};

// A goal that runs are graded by: what each condition asks for and what the last run had.
const goal = (model) => {
  const list = make("ul", { class: "gd-conditions" });
  const because = make("p", { class: "gd-because" });
  return {
    nodes: [make("p", { class: "gd-legend" }, make("b", {}, "Your experiment "), ...words(model.get("view").question)), list],
    after: [because],
    draw: (view) => {
      list.replaceChildren(...view.conditions.map(({ text, met, was }) => make("li", { "data-met": String(met) },
        `${met === null ? "○" : met ? "✓" : "✗"} ${text}`, was ? make("span", {}, `: the last run had ${was}`) : "")));
      because.replaceChildren(...words(view.because ?? ""));
      because.hidden = !view.because;
    },
  };
};

// The name under which this browser keeps its reader's answers apart from other readers' on the same server.
const reader = () => {
  try {
    const known = localStorage.getItem("gdlab-reader");
    if (known) return known;
    const bytes = crypto.getRandomValues(new Uint8Array(16));
    const name = [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
    localStorage.setItem("gdlab-reader", name);
    return name;
  } catch {
    return ""; // a browser that keeps nothing
  }
};

const progress = (model) => {
  model.send({ take: reader() });
  const body = make("tbody");
  const head = make("tr", {}, ...["Question", "Your answer", "Outcome"].map((text) => make("th", { scope: "col" }, text)));
  const table = make("table", {}, make("caption", {}, "Your progress"), make("thead", {}, head), body);
  let file = "";
  const save = () => {
    const link = make("a", { href: URL.createObjectURL(new Blob([file], { type: "application/json" })),
      download: "gdlab-progress.json" });
    document.body.append(link);
    link.click();
    link.remove();
  };
  const button = make("button", { type: "button", class: "gd-button", onclick: save }, "Export as JSON");
  return {
    nodes: [make("div", { class: "gd-history" }, table), button],
    draw: (view) => {
      file = view.file ?? "";
      const rows = view.rows ?? [];
      table.hidden = !rows.length;
      body.replaceChildren(...rows.map((row) => make("tr", {}, make("th", { scope: "row" }, ...words(row.question)),
        make("td", {}, ...words(row.answer)),
        make("td", {}, !row.done ? "not answered" : row.right === null ? "committed" : row.right ? "✓ right" : "✗ not so"))));
    },
  };
};

export default {
  initialize: hello,
  render({ model, el }) {
    const { mode } = model.get("view");
    const kinds = { predict: question, check: question, compare: comparison, progress, goal };
    const part = kinds[mode](model);
    const status = make("p", { class: "gd-said", role: "status" });
    const box = make("section", { class: `gd-box gd-${mode}`, "data-lm-suppress-shortcuts": "true" });
    // What happened is said first and shown after; an answer is given first and judged after.
    box.append(...(mode === "compare" ? [status, ...part.nodes] : [...part.nodes, status, ...(part.after ?? [])]));
    el.append(box);
    const draw = () => {
      const view = model.get("view");
      part.draw(view);
      if (status.dataset.text !== view.message) status.replaceChildren(...words(view.message ?? ""));
      status.dataset.text = view.message ?? "";
      box.dataset.tone = view.tone ?? "";
    };
    model.on("change:view", draw);
    draw();
    return () => model.off("change:view", draw);
  },
};
