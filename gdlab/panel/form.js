// Controls for the rows that Python describes; every value goes back as text, and Python alone judges it.

// A slider runs from 0 to 1000; small numbers are spread out where the scale is logarithmic.
const toSlider = (scale, value) => {
  const { min, max, log } = scale;
  const share = log ? Math.log(value / min) / Math.log(max / min) : (value - min) / (max - min);
  return Math.round(1000 * Math.min(1, Math.max(0, Number.isFinite(share) ? share : 0)));
};
const fromSlider = (scale, place) => {
  const { min, max, log, step } = scale;
  const value = log ? min * (max / min) ** (place / 1000) : min + ((max - min) * place) / 1000;
  if (step) return String(Math.round(value / step) * step);
  return String(Number(value.toPrecision(2)));
};

let count = 0;

const controls = (row, send, id) => {
  const described = `${id}-help`;
  if (row.type === "choice") {
    const select = make("select", { id, "aria-describedby": described, onchange: () => send(select.value) });
    for (const { value, label } of row.options) select.append(make("option", { value }, label));
    return { nodes: [select], update: (next) => (select.value = next.text) };
  }
  if (row.type === "switch") {
    const box = make("input", {
      type: "checkbox", id, "aria-describedby": described, onchange: () => send(box.checked ? "true" : "false"),
    });
    return { nodes: [box], update: (next) => (box.checked = next.text === "true") };
  }
  const text = make("input", {
    type: "text", id, inputmode: row.type === "number" ? "decimal" : null, autocomplete: "off", spellcheck: "false",
    "aria-describedby": `${described} ${id}-error`, onchange: () => send(text.value),
    onkeydown: (event) => event.key === "Enter" && send(text.value),
  });
  const nodes = [text];
  let slider = null;
  if (row.scale) {
    slider = make("input", {
      type: "range", min: 0, max: 1000, "aria-label": `${row.label}, slider`,
      oninput: () => {
        text.value = fromSlider(row.scale, slider.value);
        slider.setAttribute("aria-valuetext", `${text.value} ${row.unit}`);
      },
      onchange: () => send(text.value),
    });
    nodes.unshift(slider);
  }
  let toggle = null;
  if (row.optional) {
    toggle = make("input", {
      type: "checkbox", "aria-label": `${row.label}: on`, title: `Off: ${row.when_off}`, onchange: () => send(toggle.checked ? row.when_on : ""),
    });
  }
  const update = (next) => {
    if (document.activeElement !== text || next.text !== text.dataset.sent) text.value = next.text;
    text.dataset.sent = next.text;
    text.setAttribute("aria-invalid", next.error ? "true" : "false");
    const off = next.optional && next.text === "";
    text.placeholder = off || next.type === "text" ? next.when_off : "";
    if (toggle) toggle.checked = !off;
    if (slider) {
      slider.disabled = off;
      if (!next.error) slider.value = toSlider(next.scale, Number(off ? next.when_on : next.text));
      slider.setAttribute("aria-valuetext", off ? next.when_off : `${next.text} ${next.unit}`);
    }
  };
  return { nodes, update, toggle };
};

const build = (row, send) => {
  const id = `gd-field-${(count += 1)}`;
  const { nodes, update, toggle } = controls(row, send, id);
  const error = make("div", { class: "gd-error", id: `${id}-error` });
  const label = make("label", { for: id }, row.label);
  if (row.unit) label.append(make("span", { class: "gd-unit" }, ` (${row.unit})`));
  const line = make("div", { class: `gd-inputs gd-${row.type}` }, ...nodes);
  const help = make("span", { class: "gd-hidden", id: `${id}-help` }, row.help);
  const node = make(
    "div", { class: `gd-row${row.nested ? " gd-nested" : ""}`, "data-path": row.path, title: row.help },
    make("div", { class: "gd-label" }, toggle ?? null, label), line, help, error,
  );
  return {
    node,
    update: (next) => {
      update(next);
      error.textContent = next.error ?? "";
    },
  };
};

// What makes two rows the same control: only then is it updated in place, so that focus and typing survive.
const shape = ({ text, error, when_on, ...fixed }) => JSON.stringify(fixed);

export default {
  initialize: hello,
  render({ model, el }) {
    const form = make("form", { class: "gd-form", "data-lm-suppress-shortcuts": "true", "aria-label": "Experiment",
      onsubmit: (event) => event.preventDefault() });
    const basic = make("div", { class: "gd-basic" });
    const more = make("details", { class: "gd-more" }, make("summary", {}, "More settings"));
    form.append(basic, more);
    el.append(form);
    const known = new Map();
    const groups = new Map();

    const group = (name) => {
      if (!groups.has(name)) {
        groups.set(name, make("fieldset", {}, make("legend", {}, name)));
        more.append(groups.get(name));
      }
      return groups.get(name);
    };
    const place = (parent, node, before) => {
      const next = before ? before.nextSibling : parent.firstChild;
      if (node !== next) parent.insertBefore(node, next);
      return node;
    };
    const draw = () => {
      const rows = model.get("rows");
      const seen = new Set(rows.map((row) => row.path + shape(row)));
      for (const [key, control] of known) {
        if (seen.has(key)) continue;
        control.node.remove();
        known.delete(key);
      }
      const last = new Map();
      for (const row of rows) {
        const key = row.path + shape(row);
        if (!known.has(key)) known.set(key, build(row, (text) => model.send({ set: row.path, text })));
        const control = known.get(key);
        const parent = row.basic ? basic : group(row.group);
        const before = last.get(parent) ?? (row.basic ? null : parent.firstChild);
        last.set(parent, place(parent, control.node, before));
        control.update(row);
      }
      for (const fieldset of groups.values()) fieldset.hidden = fieldset.querySelector(".gd-row") === null;
      more.hidden = more.querySelector(".gd-row") === null;
    };
    model.on("change:rows", draw);
    draw();
    return () => model.off("change:rows", draw);
  },
};
