// Asks for the next pair or group, shows it, and sends the answer. Prompts and texts are set as text, never as markup.
const zoom = at("zoom"), rater = at("rater"), token = at("token"), note = at("note");
const KEYS = { ArrowLeft: "left", ArrowRight: "right", ArrowDown: "tie", b: "bad", s: "skip" };
const HELP = {
  compare: ["← left is better, → right is better", "↓ both are equally good, B both are bad"],
  stars: ["1 to 5 gives the marked sample so many stars and marks the next; 5 is best", "Enter when all have stars"],
  rank: ["1, 2, 3 ... gives the marked sample its rank and marks the next; 1 is best, equal ranks are ties", "Enter when all have ranks"],
};
const ALL = ["Z or a click enlarges all together: wheel or pinch zooms, dragging moves them at once", "N writes a note to the organizer",
  "S skips if you cannot tell, U takes the last answer back", "Every answer is stored at once; you can stop and go on later"];
let task = null, pair = null, example = false, practiced = false, shown = 0, busy = false, values = [], marked = 0;
token.value = sessionStorage.getItem("token") ?? "";
const bearer = () => token.value;
// A link may name the rater; the name survives a reload, and a link without a name opens the page of the last one.
rater.value = new URLSearchParams(location.search).get("rater") ?? localStorage.getItem("rater") ?? "";

async function sample(content, number) {
  const side = await shownSample(content, `sample ${number + 1}`);
  if (task.task === "compare") return side;
  const marks = make("div", "", { className: "marks" }), most = task.task === "stars" ? task.stars : 6;
  for (let value = 1; value <= most; value++) {
    const button = make("button", task.task === "stars" ? "★" : value, { title: `${value}`, onclick: () => mark(number, value) });
    button.dataset.value = value;
    marks.append(button);
  }
  side.append(marks);
  return side;
}

async function draw(group) {
  const old = urls;
  urls = [];
  pair = null;
  const [sides, starts] = await Promise.all([Promise.all(group.samples.map(sample)),
    Promise.all((group.starts ?? []).map(path => medium(path, "start image")))]);
  for (const side of sides) for (const button of side.querySelectorAll(".marks button")) {
    button.hidden = task.task === "rank" && button.dataset.value > sides.length;
  }
  at("prompt").textContent = group.prompt;
  at("sides").replaceChildren(...sides);
  at("starts").replaceChildren(...starts);
  at("enlarge").hidden = !at("sides").querySelector("img, video");
  [values, marked] = [sides.map(() => 0), 0];
  old.forEach(URL.revokeObjectURL);
  note.value = "";
  at("pair").hidden = false;
  at("end").hidden = true;
  pair = group;
  look();
  scrollTo(0, 0);
  shown = performance.now();
}

// Before the first answer: the guidelines, and a pair of no run whose answer is not stored.
async function practice() {
  const drawn = ["#c22", "#e99", "#27c"].map(color => {
    const canvas = make("canvas", "", { width: 300, height: 200 }), pen = canvas.getContext("2d");
    pen.fillStyle = color;
    pen.fillRect(0, 0, 300, 200);
    return { media: canvas.toDataURL(), text: null };
  });
  const texts = ["Red", "Red is the color of my car.", "Monday"].map(text => ({ media: null, text }));
  example = true;
  at("guide").open = true;
  at("hint").hidden = false;
  at("hint").textContent = `Example, not stored: ${task.task === "compare" ? "the left one fits best. Answer that to begin." : "they fit from left to right less and less. Answer that to begin."}`;
  const samples = (task.media ? drawn : texts).filter((_, number) => task.task !== "compare" || number !== 1);
  await draw({ prompt: task.media ? "bright red" : "Name a color.", samples });
}

async function show(state) {
  Object.assign(at("progress"), { max: state.total || 1, value: state.done });
  at("count").textContent = `${state.done} of ${state.total}`;
  if (state.group && !state.done && !practiced) return practice();
  if (example) at("guide").open = false;
  example = false;
  at("hint").hidden = true;
  if (state.group) return draw(state.group);
  pair = null;
  note.value = "";
  at("pair").hidden = true;
  at("end").hidden = false;
  at("thanks").textContent = `${state.rater}, you answered ${state.done - state.skipped} and skipped ${state.skipped}; nothing is left for you. All answers are stored, and this page can be closed. To correct the last answer, take it back with Undo.`;
}

const current = () => `api/group?rater=${encodeURIComponent(rater.value)}`;
const update = async (path, body) => show(await (await request(path, body)).json());

async function act(work) {
  if (busy) return;
  busy = true;
  for (const button of document.querySelectorAll("button")) button.disabled = true;
  let text = "";
  try {
    await work();
  } catch (error) {
    text = error.message;
    // The pair may be answered already, in another tab or before a connection broke, or the question be another one.
    if (error.status === 409 || error.status === 404) await setUp().then(() => update(current())).catch(() => {});
  }
  at("message").textContent = text;
  at("message").hidden = !text;
  for (const button of document.querySelectorAll("button")) button.disabled = false;
  busy = false;
  look();
}

function look() {
  if (!task) return;
  for (const [number, side] of [...at("sides").children].entries()) {
    side.classList.toggle("marked", task.task !== "compare" && number === marked);
    for (const button of side.querySelectorAll(".marks button")) {
      const value = Number(button.dataset.value);
      button.classList.toggle("on", task.task === "stars" ? value <= values[number] : value === values[number]);
    }
  }
  for (const button of document.querySelectorAll("[data-choice]")) button.disabled = busy || !pair;
  at("done").disabled = busy || !pair || values.includes(0);
}

function mark(number, value) {
  if (!pair || value > (task.task === "stars" ? task.stars : values.length)) return;
  values[number] = value;
  const next = values.findIndex((each, place) => !each && place > number);
  marked = next >= 0 ? next : values.includes(0) ? values.indexOf(0) : number;
  look();
}

const undo = () => rater.value ? act(() => update("api/undo", { rater: rater.value })) : rater.focus();
function answer(given) {
  if (!pair || busy) return;
  if (example) {
    const fits = given.values ? given.values[0] === (task.task === "stars" ? Math.max : Math.min)(...given.values) : given.choice === "left";
    if (!fits) at("hint").textContent = "In this example the left one fits best: the other ones do not show the prompt. Try again; nothing is stored.";
    else if (!rater.value) rater.focus();
    else {
      practiced = true;
      act(() => update(current()));
    }
    return;
  }
  act(() => update("api/answer", { group: pair.name, rater: rater.value, note: note.value, seconds: (performance.now() - shown) / 1000, ...given }));
}
const choose = choice => (choice === "skip" || task.task === "compare") && answer({ choice });
const finish = () => task.task !== "compare" && !values.includes(0) && answer({ values });

// All samples at once, with one scale and place.
let scale = 1, place = [0, 0], pressed = new Map(), moved = 0;
function enlarge() {
  const media = [...document.querySelectorAll("#starts img, #sides img, #sides video")];
  if (!media.length || zoom.open) return;
  zoom.replaceChildren(...media.map(each => {
    const figure = make("figure"), copy = each.matches("video") ? film(each.src, false) : each.cloneNode();
    figure.append(copy);
    return figure;
  }));
  lens(1, [0, 0]);
  pressed.clear();
  zoom.showModal();
}
function lens(size, [x, y]) {
  scale = Math.min(32, Math.max(1, size));
  place = scale === 1 ? [0, 0] : [x, y];
  for (const [name, value] of [["--size", scale], ["--x", `${place[0]}px`], ["--y", `${place[1]}px`]]) zoom.style.setProperty(name, value);
}
function scaled(factor, event) {
  const figure = event?.target.closest?.("figure"), box = figure?.getBoundingClientRect();
  const middle = box ? [event.clientX - box.x - box.width / 2, event.clientY - box.y - box.height / 2] : [0, 0];
  const real = Math.min(32, Math.max(1, scale * factor)) / scale;
  lens(scale * real, place.map((each, axis) => middle[axis] - (middle[axis] - each) * real));
}
zoom.addEventListener("wheel", event => (event.preventDefault(), scaled(Math.exp(-event.deltaY / 400), event)), { passive: false });
zoom.addEventListener("pointerdown", event => {
  event.preventDefault();
  if (!pressed.size) moved = 0;
  pressed.set(event.pointerId, event);
});
zoom.addEventListener("pointermove", event => {
  const before = pressed.get(event.pointerId), other = [...pressed.values()].find(each => each.pointerId !== event.pointerId);
  if (!before) return;
  const far = each => Math.hypot(each.clientX - other.clientX, each.clientY - other.clientY) || 1;
  const step = [event.clientX - before.clientX, event.clientY - before.clientY];
  moved += Math.hypot(...step);
  if (other) scaled(far(event) / far(before), event);
  else lens(scale, [place[0] + step[0], place[1] + step[1]]);
  pressed.set(event.pointerId, event);
});
for (const kind of ["pointerup", "pointercancel"]) addEventListener(kind, event => pressed.delete(event.pointerId));

addEventListener("keydown", event => {
  const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
  if (event.target === note && (key === "Enter" || key === "Escape")) note.blur();
  else if (event.repeat || event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, video")) return;
  else if (zoom.open) {
    if (key === "z") zoom.close();
    else if (key === "+" || key === "=") scaled(1.5);
    else if (key === "-") scaled(1 / 1.5);
    else return;
  } else if (key === "u" || key === "Backspace") undo();
  else if (key === "g") at("guide").open = !at("guide").open;
  else if (key === "z" || (key === "Enter" && event.target.matches("img"))) enlarge();
  else if (key === "n") note.focus();
  else if (!task || !pair) return;
  else if (task.task !== "compare" && key >= "1" && key <= "9") mark(marked, Number(key));
  else if (task.task !== "compare" && key.startsWith("Arrow")) {
    marked = Math.min(values.length - 1, Math.max(0, marked + (key === "ArrowRight" || key === "ArrowDown" ? 1 : -1)));
    look();
  } else if (task.task !== "compare" && key === "Enter" && !event.target.matches("button, summary")) finish();
  else if (KEYS[key]) choose(KEYS[key]);
  else return;
  event.preventDefault();
});
addEventListener("click", event => {
  if (zoom.open) {
    if (moved < 5) zoom.close();
    return;
  }
  if (event.target.matches("#sides img, #starts img")) enlarge();
  const button = event.target.closest("footer button");
  if (!button) return;
  button.blur();
  if (button.id === "undo") undo();
  else if (button.id === "enlarge") enlarge();
  else if (button.id === "done") finish();
  else choose(button.dataset.choice);
});

async function setUp() {
  task = await (await request("api/question")).json();
  at("question").textContent = task.question;
  at("guidelines").textContent = task.guidelines;
  at("keys").replaceChildren(...[...HELP[task.task], ...ALL].map(text => make("li", text)));
  for (const button of document.querySelectorAll("[data-task]")) button.hidden = (button.dataset.task === "compare") !== (task.task === "compare");
  document.body.dataset.task = task.task;
}
function begin() {
  rater.value = rater.value.trim();
  sessionStorage.setItem("token", token.value);
  localStorage.setItem("rater", rater.value);
  history.replaceState(null, "", rater.value ? `?rater=${encodeURIComponent(rater.value)}` : location.pathname);
  at("ask").hidden = rater.value !== "";
  if (!rater.value) rater.focus();
  act(async () => {
    await setUp();
    await (rater.value ? update(current()) : practice());
  });
}
for (const field of [rater, token]) field.addEventListener("change", () => {
  field.blur();
  begin();
});
begin();
