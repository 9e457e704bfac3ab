// The page's half of a chart: it holds the same state as the kernel, and draws it when it gets round to it.
const ARRAYS = {
  float64: Float64Array, float32: Float32Array, int32: Int32Array, uint32: Uint32Array,
  int16: Int16Array, uint16: Uint16Array, int8: Int8Array, uint8: Uint8Array,
};
const QUIET_MS = 5000;
const OFF_SCREEN_MS = 700; // what cannot be seen is drawn less often: the rest of the page gets the time
const LETTER_PX = 5.9; // of a caption, in the widest of the fonts that it may come in
const CONFIG = {
  displaylogo: false,
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"],
};

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value) && !ArrayBuffer.isView(value);

// Undo `encode` of the kernel: bytes become typed arrays, tables arrays of rows.
const decode = (value, buffers) => {
  if (Array.isArray(value)) return value.map((item) => decode(item, buffers));
  if (!isObject(value)) return value;
  if (!("dtype" in value && "bytes" in value))
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, decode(item, buffers)]));
  const view = typeof value.bytes === "number" ? buffers[value.bytes] : value.bytes;
  const bytes = view.buffer ? view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength) : view;
  const flat = new ARRAYS[value.dtype](bytes);
  if (value.shape.length < 2) return flat;
  const [rows, columns] = value.shape;
  return Array.from({ length: rows }, (_, row) => flat.subarray(row * columns, (row + 1) * columns));
};

const merge = (into, changes) => {
  for (const [key, value] of Object.entries(changes)) {
    if (isObject(value) && isObject(into[key])) merge(into[key], value);
    else into[key] = value;
  }
};

const joined = (head, tail) => {
  const whole = new Float64Array(head.length + tail.length);
  whole.set(head);
  whole.set(tail, head.length);
  return whole;
};

const change = (figure, { op, trace, ...rest }) => {
  if (op === "figure") Object.assign(figure, rest.figure);
  else if (op === "relayout") merge(figure.layout, rest.layout);
  else if (op === "replace") merge(figure.data[trace], rest);
  else for (const [key, value] of Object.entries(rest))
    figure.data[trace][key] = joined(figure.data[trace][key] ?? [], value);
};

// A copy (Plotly writes into what it is given) with the colours of the theme; long arrays are shared.
const recoloured = (value, colours) => {
  if (typeof value === "string") return colours.get(value) ?? value;
  if (Array.isArray(value)) return value.map((item) => recoloured(item, colours));
  if (!isObject(value)) return value;
  return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, recoloured(item, colours)]));
};

// The captions below the question, wrapped by the chart's true width, and the plot moved down to make room for them.
const wrapped = (figure, width) => {
  const { meta, title, margin } = figure.layout;
  if (!meta?.captions?.length || !title?.subtitle || margin?.t === undefined) return;
  const columns = Math.max(20, Math.floor((width - 24) / LETTER_PX));
  const lines = meta.captions.flatMap((caption) => {
    const found = [""];
    for (const word of caption.split(" ")) {
      const last = found.at(-1);
      if (last && last.length + 1 + word.length > columns) found.push(word);
      else found[found.length - 1] = last ? `${last} ${word}` : word;
    }
    return found;
  });
  title.subtitle.text = lines.join("<br>");
  margin.t = HEAD_PX + LINE_PX * lines.length;
};

export default () => {
  const state = { seq: -1, live: false, title: "", data: [], layout: {} };
  const views = new Set();
  let heardAt = performance.now();
  let askAfter = QUIET_MS;

  const say = (model, message) => {
    try {
      model.send(message);
    } catch {
      // The kernel has gone; what is drawn stays.
    }
  };
  const changed = () => views.forEach((draw) => draw());

  const take = (message, buffers, model) => {
    heardAt = performance.now();
    askAfter = QUIET_MS;
    if (message.op === "whole" && message.state.seq >= state.seq) {
      Object.assign(state, decode(message.state, buffers));
    } else if (message.op === "change" && message.seq > state.seq) {
      if (message.from !== state.seq) return say(model, { op: "ready", seq: state.seq });
      message.operations.forEach((operation) => change(state, decode(operation, buffers)));
      state.seq = message.seq;
      state.live = true;
    } else return;
    changed();
    if (!views.size) say(model, { op: "seen", seq: state.seq });
  };

  return {
    initialize({ model }) {
      const first = model.get("_state");
      if (first?.data) take({ op: "whole", state: first }, [], model);
      const receive = (message, buffers) => take(message, buffers, model);
      model.on("msg:custom", receive);
      listenForGood(model);
      say(model, { op: "ready", seq: state.seq });
      // A message may be lost (the network, a sleeping computer): while a run goes on, silence is a reason to ask.
      const timer = setInterval(() => {
        if (!state.live || performance.now() - heardAt < askAfter) return;
        heardAt = performance.now();
        askAfter = Math.min(2 * askAfter, 60000);
        say(model, { op: "ready", seq: state.seq });
      }, 1000);
      return () => {
        clearInterval(timer);
        model.off("msg:custom", receive);
      };
    },

    render({ model, el }) {
      const box = document.createElement("div");
      const words = document.createElement("p");
      box.className = "gd-chart";
      box.style.cssText = "width:100%;min-width:0;overflow:hidden";
      box.setAttribute("role", "img");
      words.id = `gd-${Math.random().toString(36).slice(2)}`;
      words.style.cssText = "position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%);white-space:nowrap";
      box.setAttribute("aria-describedby", words.id);
      el.style.position ||= "relative";
      el.append(box, words);

      const dark = new Map(Object.entries(model.get("_dark")));
      let plotly, over, drawing, again, width, onScreen, wake;

      const draw = async () => {
        again = true;
        if (drawing || !plotly || !box.offsetWidth) {
          if (!drawing && !box.offsetWidth) say(model, { op: "seen", seq: state.seq });
          return;
        }
        drawing = true;
        while (again && !over) {
          await new Promise((go) => {
            if (onScreen) return requestAnimationFrame(go);
            wake = go;
            setTimeout(go, OFF_SCREEN_MS);
          });
          if (over) break;
          again = false;
          const { seq } = state;
          const figure = recoloured({ data: state.data, layout: state.layout }, isDark() ? dark : new Map());
          wrapped(figure, box.offsetWidth);
          Object.assign(figure.layout, { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)" });
          figure.layout.uirevision ??= "keep";
          const question = state.title || state.layout.title?.text || "Chart";
          const sentence = state.layout.meta?.description ?? question;
          box.setAttribute("aria-label", `${question} ${(state.layout.meta?.captions ?? []).join(" ")}`.trim());
          if (words.textContent !== sentence) words.textContent = sentence;
          try {
            await plotly.react(box, figure.data, figure.layout, CONFIG);
          } catch (error) {
            console.error("A chart could not be drawn:", error);
          }
          box.dataset.seq = seq;
          width = box.offsetWidth;
          say(model, { op: "seen", seq });
        }
        drawing = false;
      };

      const resized = new ResizeObserver(() => {
        if (again || box.offsetWidth !== width) draw();
      });
      resized.observe(box);
      const seen = new IntersectionObserver((entries) => {
        onScreen = entries.at(-1).isIntersecting;
        if (onScreen) wake?.();
      });
      seen.observe(box);
      const unwatch = watchTheme(draw);
      views.add(draw);
      gate.wanted = true;
      gate.load?.();
      gate.ready.then((loaded) => {
        plotly = loaded;
        if (!over) draw();
      });
      return () => {
        over = true;
        views.delete(draw);
        unwatch();
        resized.disconnect();
        seen.disconnect();
        if (plotly) plotly.purge(box);
      };
    },
  };
};
