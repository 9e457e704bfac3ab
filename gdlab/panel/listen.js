// anywidget gives a model two seconds to start; one that takes longer on a slow page never gets a message again. So the
// messages are taken from the model's own channel, in the way of ipywidgets, which does not wait for anything.
const listenForGood = async (model) => {
  try {
    const whole = await model.widget_manager.get_model(model.get("_id"));
    const handle = Object.getPrototypeOf(Object.getPrototypeOf(whole))._handle_comm_msg;
    if (whole.comm && handle) whole.comm.on_msg(handle.bind(whole));
  } catch (error) {
    console.warn("A widget listens in anywidget's way:", error);
  }
};
