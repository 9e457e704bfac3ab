// The page beats once a second and the kernel answers each beat; each side notices when the other has gone.
export default {
  initialize({ model }) {
    listenForGood(model);
    const page = Math.random().toString(36).slice(2);
    const dashboard = document.body.dataset.voila !== undefined; // else a notebook, whose panels a reload would lose
    const banner = document.createElement("div");
    const note = document.createElement("div");
    banner.className = "gd-gone";
    banner.setAttribute("role", "alert");
    note.className = "gd-gone gd-busy";
    note.setAttribute("role", "status");
    let waitingSince = null;
    let unanswered = 0;
    let lastBusy = -Infinity;

    const hide = () => (banner.remove(), note.remove());
    const show = () => {
      if (banner.isConnected) return;
      note.remove();
      banner.textContent = dashboard ? "The kernel does not answer: it has gone. If this stays, reload the page. "
        : "The kernel does not answer: it has gone, or was restarted. Run the notebook's cells again.";
      if (dashboard) {
        const button = document.createElement("button");
        button.textContent = "Reload";
        button.onclick = () => location.reload();
        banner.append(button);
      }
      document.body.append(banner);
    };
    const showBusy = () => {
      banner.remove();
      if (note.isConnected) return;
      note.textContent = dashboard ? "The kernel is still busy: this panel answers when it is done."
        : "The notebook is still running its cells: this panel answers when they are done.";
      document.body.append(note);
    };
    // A kernel that opens the beats' own channel in the middle of a cell says afterwards that it is idle, and so does its
    // status here. So what it says of its cells is listened to as well, until it restarts or ends.
    const cells = model.widget_manager?.kernel;
    let inCell = cells?.status === "busy";
    const heard = (_, { header, parent_header, content }) => {
      if (header.msg_type === "status" && parent_header.msg_type === "execute_request")
        inCell = content.execution_state === "busy";
    };
    const became = (_, status) => (inCell &&= status === "busy" || status === "idle");
    // A kernel whose connection holds and that says it is busy is alive, however long a cell takes. A dashboard runs no
    // more cells once its page is there, and its server may not tell of a kernel's end, so there patience has an end.
    const busy = (silent_ms, limit_ms) => {
      const kernel = model.widget_manager?.kernel;
      const works = kernel?.status === "busy" || (!dashboard && inCell);
      const alive = works && kernel?.connectionStatus === "connected";
      return alive && (!dashboard || silent_ms < 2 * limit_ms);
    };
    const beat = (more = {}) => {
      waitingSince ??= performance.now();
      unanswered += 1;
      try {
        model.send({ beat: page, hidden: document.hidden, ...more });
      } catch {
        // A closed comm is the same as no answer.
      }
    };
    const answered = (message) => {
      if (message.reply !== page) return;
      waitingSince = null;
      unanswered = 0;
      hide();
    };
    // A hidden tab beats once a minute, so what counts is how long a beat has had no answer, not the time between beats.
    const tick = () => {
      beat();
      const [now, limit] = [performance.now(), 1000 * model.get("answer_within_s")];
      if (busy(now - waitingSince, limit)) lastBusy = now;
      if (unanswered <= 3 || now - waitingSince <= limit) return;
      if (now - lastBusy <= limit) showBusy(); // between two cells it is idle for a moment
      else show();
    };
    const away = () => beat({ bye: true });
    const turned = () => beat();

    model.on("msg:custom", answered);
    cells?.iopubMessage?.connect(heard);
    cells?.statusChanged?.connect(became);
    addEventListener("pagehide", away);
    document.addEventListener("visibilitychange", turned);
    beat();
    const timer = setInterval(tick, 1000);
    return () => {
      clearInterval(timer);
      hide();
      model.off("msg:custom", answered);
      cells?.iopubMessage?.disconnect(heard);
      cells?.statusChanged?.disconnect(became);
      removeEventListener("pagehide", away);
      document.removeEventListener("visibilitychange", turned);
    };
  },
};
