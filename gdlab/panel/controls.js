// Run, Stop, Reset, where it runs, how far it is, and one plain sentence about what is going on.

// A press that the kernel has not answered by then may be repeated: it may have been lost on its way.
const UNANSWERED_MS = 10000;

export default {
  initialize: hello,
  render({ model, el }) {
    const buttons = make("div", { class: "gd-buttons" });
    const button = (name, label, title) => {
      const node = make("button", { type: "button", class: `gd-button gd-${name}`, title, onclick: () => press(name) },
        label);
      buttons.append(node);
      return node;
    };
    // Run is shut from the click on, not from the kernel's answer on: a second click in between would be passed over.
    let asked = "";
    const press = (name) => {
      const token = `${Date.now()}-${Math.random()}`;
      model.send({ press: name, token });
      if (name !== "run") return;
      asked = token;
      setTimeout(() => {
        if (asked === token) asked = "";
        draw();
      }, UNANSWERED_MS);
      draw();
    };
    const run = button("run", "▶ Run", "Start the workers with the settings below");
    const stop = button("stop", "■ Stop", "Stop the workers; what they did so far is kept");
    const reset = button("reset", "↺ Reset", "Go back to the settings that this page started with");
    for (const [node, name] of [[run, "Run"], [stop, "Stop"], [reset, "Reset"]]) node.setAttribute("aria-label", name);

    const select = make("select", { onchange: () => model.send({ backend: select.value }) });
    const where = make("label", { class: "gd-where" }, "Run on ", select);
    const progress = make("progress", { max: 1, "aria-label": "Progress of the run" });
    const count = make("div", { class: "gd-count" });
    const status = make("p", { class: "gd-status", role: "status" });
    el.append(make("div", { class: "gd-controls", "data-lm-suppress-shortcuts": "true" },
      buttons, where, progress, count, status));

    const draw = () => {
      const busy = model.get("busy");
      if (asked === model.get("answered")) asked = "";
      run.disabled = busy || asked !== "";
      stop.disabled = !busy;
      const backends = model.get("backends");
      if (select.options.length !== backends.length)
        select.replaceChildren(...backends.map(([value, label]) => new Option(label, value)));
      select.value = model.get("backend");
      select.disabled = busy;
      where.hidden = backends.length < 2;
      if (model.get("fraction") < 0) progress.removeAttribute("value");
      else progress.value = model.get("fraction");
      count.textContent = model.get("count");
      if (status.textContent !== model.get("message")) status.textContent = model.get("message");
      status.classList.toggle("gd-error", model.get("tone") === "error");
    };
    model.on("change", draw);
    draw();
    return () => model.off("change", draw);
  },
};
