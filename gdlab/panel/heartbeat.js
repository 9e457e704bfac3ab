// The page beats once a second and the kernel answers each beat; each side notices when the other has gone.
export default {
  initialize({ model }) {
    listenForGood(model);
    const page = Math.random().toString(36).slice(2);
    const banner = document.createElement("div");
    banner.className = "gd-gone";
    banner.setAttribute("role", "alert");
    let waitingSince = null;
    let unanswered = 0;

    const hide = () => banner.remove();
    const show = () => {
      if (banner.isConnected) return;
      banner.textContent = "The kernel does not answer: it is busy, or it has gone. If this stays, reload the page. ";
      const button = document.createElement("button");
      button.textContent = "Reload";
      button.onclick = () => location.reload();
      banner.append(button);
      document.body.append(banner);
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
      if (unanswered > 3 && performance.now() - waitingSince > 1000 * model.get("answer_within_s")) show();
    };
    const away = () => beat({ bye: true });
    const turned = () => beat();

    model.on("msg:custom", answered);
    addEventListener("pagehide", away);
    document.addEventListener("visibilitychange", turned);
    beat();
    const timer = setInterval(tick, 1000);
    return () => {
      clearInterval(timer);
      hide();
      model.off("msg:custom", answered);
      removeEventListener("pagehide", away);
      document.removeEventListener("visibilitychange", turned);
    };
  },
};
