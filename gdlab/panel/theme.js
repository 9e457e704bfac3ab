// Is the page dark? JupyterLab and Voila say so on the body; elsewhere the reader's own preference counts.
const preference = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => {
  const light = document.body.dataset.jpThemeLight;
  return light === undefined ? preference.matches : light === "false";
};
// Call back at every change; returns a function that ends the watch.
const watchTheme = (changed) => {
  const observer = new MutationObserver(changed);
  observer.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light"] });
  preference.addEventListener("change", changed);
  return () => {
    observer.disconnect();
    preference.removeEventListener("change", changed);
  };
};
