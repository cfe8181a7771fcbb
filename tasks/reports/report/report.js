// Shows two images next to each other or with a slider between them, and enlarges images in a dialog.
document.documentElement.classList.add("js");
const dialog = document.querySelector("dialog");
let pressed = 0;
addEventListener("pointerdown", event => { pressed = event.clientX; });
addEventListener("input", event => { event.target.parentNode.style.setProperty("--at", event.target.value + "%"); });
addEventListener("click", event => {
  const media = event.target.closest(".media");
  if (event.target.closest(".mode")) document.documentElement.classList.toggle("slider");
  else if (!dialog.open && media) {
    // A drag ends with a click too.
    if (event.target.matches("input") && Math.abs(event.clientX - pressed) > 3) return;
    dialog.querySelector("div").replaceChildren(media.cloneNode(true));
    dialog.showModal();
  } else if (event.target === dialog || event.target.closest("button")) dialog.close();
});
