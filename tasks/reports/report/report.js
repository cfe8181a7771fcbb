// Wipes between two images, and enlarges images in a dialog. Without scripts the images are side by side.
document.documentElement.classList.add("js");
const dialog = document.querySelector("dialog");
let pressed = 0;
addEventListener("pointerdown", event => { pressed = event.clientX; });
addEventListener("input", event => { event.target.parentNode.style.setProperty("--at", event.target.value + "%"); });
addEventListener("click", event => {
  const media = event.target.closest(".media");
  if (!dialog.open && media) {
    // A drag ends with a click too.
    if (event.target.matches("input") && Math.abs(event.clientX - pressed) > 3) return;
    dialog.querySelector("div").replaceChildren(media.cloneNode(true));
    dialog.showModal();
  } else if (event.target === dialog || event.target.closest("button")) dialog.close();
});
