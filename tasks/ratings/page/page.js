// Asks for the next pair, shows it, and sends the answer. Prompts and texts are set as text, never as markup.
const at = id => document.getElementById(id);
const zoom = at("zoom"), rater = at("rater"), token = at("token");
const KEYS = { ArrowLeft: "left", ArrowRight: "right", ArrowDown: "tie", s: "skip", S: "skip" };
let pair = null, shown = 0, busy = false, urls = [];
token.value = sessionStorage.getItem("token") ?? "";
// A link may name the rater; the name survives a reload, and a link without a name opens the page of the last one.
rater.value = new URLSearchParams(location.search).get("rater") ?? localStorage.getItem("rater") ?? "";

async function request(path, body) {
  const headers = token.value ? { authorization: `Bearer ${token.value}` } : {};
  if (body) headers["content-type"] = "application/json";
  const answer = await fetch(path, body ? { method: "POST", headers, body: JSON.stringify(body) } : { headers }).catch(() => {
    throw new Error("The server does not answer. The answers given before are stored. Once it runs again, reload this page: it goes on with the first pair that has no answer.");
  });
  if (answer.ok) return answer;
  const about = await answer.json().catch(() => null);
  if (answer.status === 401) at("secret").hidden = false;
  throw Object.assign(new Error(about?.detail ?? `The server answered with status ${answer.status}.`), { status: answer.status });
}

async function medium(path, label) {
  const blob = await (await request(path)).blob(), url = URL.createObjectURL(blob);
  urls.push(url);
  const film = blob.type.startsWith("video/"), element = document.createElement(film ? "video" : "img");
  if (film) Object.assign(element, { controls: true, loop: true, muted: true, autoplay: true });
  else element.alt = label;
  const loaded = new Promise((done, failed) => {
    element.addEventListener(film ? "loadeddata" : "load", done);
    element.addEventListener("error", () => failed(new Error(`The browser cannot show the ${label}.`)));
  });
  element.src = url;
  await loaded;
  if (!film) {
    element.classList.toggle("small", Math.max(element.naturalWidth, element.naturalHeight) <= 256);
    element.tabIndex = 0;
    element.title = "Enlarge";
  }
  return element;
}

async function side(content, label) {
  const found = content.media ? [await medium(content.media, label)] : [];
  if (content.text !== null) {
    const text = document.createElement("pre");
    text.textContent = content.text;
    found.push(text);
  }
  return found;
}

async function show(state) {
  const old = urls;
  urls = [];
  pair = null;
  Object.assign(at("progress"), { max: state.total, value: state.done });
  at("count").textContent = `${state.done} of ${state.total}`;
  at("end").hidden = state.pair !== null;
  if (state.pair) {
    const [left, right, starts] = await Promise.all([side(state.pair.left, "left sample"),
      side(state.pair.right, "right sample"), Promise.all(state.pair.starts.map(path => medium(path, "start image")))]);
    at("prompt").textContent = state.pair.prompt;
    at("left").replaceChildren(...left);
    at("right").replaceChildren(...right);
    at("starts").replaceChildren(...starts);
    scrollTo(0, 0);
  }
  at("pair").hidden = state.pair === null;
  old.forEach(URL.revokeObjectURL);
  pair = state.pair;
  shown = performance.now();
}

// Whoever has no name yet sees a pair, and cannot answer.
const current = () => `api/pair?rater=${encodeURIComponent(rater.value || "new")}`;
const update = async (path, body) => show(await (await request(path, body)).json());

async function next(path, body) {
  if (busy) return;
  busy = true;
  for (const button of document.querySelectorAll("button")) button.disabled = true;
  let text = "";
  try {
    await update(path, body);
  } catch (error) {
    text = error.message;
    // The pair may be answered already, in another tab or before a connection broke.
    if (error.status === 409 || error.status === 404) await update(current()).catch(() => {});
  }
  at("message").textContent = text;
  at("message").hidden = !text;
  for (const button of document.querySelectorAll("button")) button.disabled = button.dataset.choice && !pair;
  busy = false;
}

const undo = () => rater.value ? next("api/undo", { rater: rater.value }) : rater.focus();
function choose(choice) {
  if (!rater.value) rater.focus();
  else if (pair) next("api/answer", { pair: pair.name, rater: rater.value, choice, seconds: (performance.now() - shown) / 1000 });
}
function enlarge(image) {
  zoom.replaceChildren(image.cloneNode());
  zoom.showModal();
}

addEventListener("keydown", event => {
  if (event.repeat || event.ctrlKey || event.metaKey || event.altKey || zoom.open || event.target.matches("input, video")) return;
  if (KEYS[event.key]) choose(KEYS[event.key]);
  else if (event.key === "u" || event.key === "U" || event.key === "Backspace") undo();
  else if (event.key === "Enter" && event.target.matches("img")) enlarge(event.target);
  else return;
  event.preventDefault();
});
addEventListener("click", event => {
  if (zoom.open) zoom.close();
  else if (event.target.matches("img")) enlarge(event.target);
  const button = event.target.closest("button");
  if (button) button.id === "undo" ? undo() : choose(button.dataset.choice);
});
function begin() {
  rater.value = rater.value.trim();
  sessionStorage.setItem("token", token.value);
  localStorage.setItem("rater", rater.value);
  history.replaceState(null, "", rater.value ? `?rater=${encodeURIComponent(rater.value)}` : location.pathname);
  at("ask").hidden = rater.value !== "";
  if (!rater.value) rater.focus();
  next(current());
}
for (const field of [rater, token]) field.addEventListener("change", () => {
  field.blur();
  begin();
});
begin();
