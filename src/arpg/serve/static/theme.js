// The theme: light, dark or the system's; a classic script, so that it applies before the first paint.
(() => {
  const NAMES = ["system", "light", "dark"];
  const read = () => {
    try {
      return localStorage.getItem("arpg.theme") || "system";
    } catch {
      return "system"; // storage may be forbidden; the page works without it
    }
  };
  let theme = read();
  const apply = () => {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (!button) return;
    button.querySelector("span").textContent = theme[0].toUpperCase() + theme.slice(1);
    button.setAttribute("aria-label", `Theme: ${theme}`);
  };
  apply();
  const announce = () => document.dispatchEvent(new Event("themechange")); // canvases are drawn again
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", announce);
  document.addEventListener("DOMContentLoaded", () => {
    apply();
    document.getElementById("theme").addEventListener("click", () => {
      theme = NAMES[(NAMES.indexOf(theme) + 1) % NAMES.length];
      try {
        localStorage.setItem("arpg.theme", theme);
      } catch {
        // as above
      }
      apply();
      announce();
    });
  });
})();
