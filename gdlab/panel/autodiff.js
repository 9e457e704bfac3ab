// What the pieces about automatic differentiation share: fields, buttons, code, cards with a switch, and one sentence.

const field = ({ name, label, kind, value, options, placeholder }) => {
  const input = kind === "select" ? make("select") : make("input", { type: "text", spellcheck: "false",
    autocomplete: "off", autocapitalize: "off", placeholder });
  if (kind === "select") input.append(...options.map(([key, text]) => new Option(text, key)));
  input.value = value ?? "";
  const note = make("span", { class: "gd-note" });
  input.setAttribute("aria-label", label);
  return { name, input, note, node: make("label", { class: `gd-field gd-field-${kind ?? "text"}` },
    make("span", {}, label), input, note) };
};

// What torch gives is shown when a reader asks for it, and then stays shown.
const card = (model, asked, { name, title, on, label, code, lines, why }) => {
  const box = make("input", { type: "checkbox", onchange: () => model.send({ act: "switch", name, on: box.checked }) });
  box.checked = on;
  const told = make("details", { open: asked.has(name), ontoggle: () => asked[told.open ? "add" : "delete"](name) },
    make("summary", {}, "What torch gives"),
    make("dl", {}, ...lines.flatMap(([term, text]) => [make("dt", {}, term), make("dd", {}, text)])), make("p", {}, why));
  return make("section", { class: "gd-box gd-card", "data-name": name, "data-tone": on ? "good" : "bad" },
    make("b", {}, title), make("label", { class: "gd-switch" }, box, label), make("pre", {}, code), told);
};

export default {
  initialize: hello,
  render({ model, el }) {
    const first = model.get("view");
    const fields = (first.fields ?? []).map(field);
    const values = () => Object.fromEntries(fields.map(({ name, input }) => [name, input.value]));
    const act = (name) => model.send({ act: name, values: values() });
    const buttons = (first.buttons ?? []).map(({ name, label, title }) =>
      make("button", { type: "button", class: "gd-button", title, "aria-label": title, onclick: () => act(name) }, label));
    const status = make("p", { class: "gd-said", role: "status" });
    const asked = new Set();
    const cards = make("div", { class: "gd-cards" });
    const box = make("section", { class: `gd-parts gd-${first.piece}`, "data-lm-suppress-shortcuts": "true",
      tabindex: first.arrows ? 0 : null, role: first.arrows ? "group" : null, "aria-label": first.arrows ? first.title : null },
      first.title ? make("b", {}, first.title) : null, first.code ? make("pre", {}, first.code) : null,
      make("div", { class: "gd-fields" }, ...fields.map(({ node }) => node)), make("div", { class: "gd-step" }, ...buttons),
      status, cards);
    for (const { input } of fields) input.addEventListener("change", () => first.live && act("set"));
    // Notebooks keep these keys to themselves.
    box.addEventListener("keydown", (event) => {
      const typing = event.target.matches("input[type=text], select");
      const step = { ArrowRight: "next", ArrowLeft: "back", Home: "first", End: "last" }[event.key];
      const name = typing ? event.key === "Enter" && first.enter : first.arrows && step;
      if (!name || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      event.stopPropagation();
      act(name);
    });
    el.append(box);
    const draw = () => {
      const view = model.get("view");
      status.textContent = view.message ?? "";
      status.dataset.tone = view.tone ?? "";
      for (const [at, { input, note }] of fields.entries()) {
        const { options, value, note: text, tone } = view.fields[at];
        if (options && options.length !== input.options.length) input.replaceChildren(...options.map(([key, label]) => new Option(label, key)));
        if (value !== undefined && document.activeElement !== input) input.value = value;
        note.textContent = text ?? "";
        note.dataset.tone = tone ?? "";
        input.setAttribute("aria-invalid", tone === "bad");
      }
      const held = document.activeElement?.closest?.(".gd-card")?.dataset.name;
      if (view.cards) cards.replaceChildren(...view.cards.map((one) => card(model, asked, one)));
      if (held && el.contains(cards)) cards.querySelector(`[data-name="${held}"] input`)?.focus();
    };
    model.on("change:view", draw);
    draw();
    return () => model.off("change:view", draw);
  },
};
