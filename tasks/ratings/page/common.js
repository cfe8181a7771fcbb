// What the pages of raters and of the organizer share. Prompts and texts are set as text, never as markup.
const at = id => document.getElementById(id);
let urls = [];

async function request(path, body) {
  const headers = bearer() ? { authorization: `Bearer ${bearer()}` } : {};
  if (body) headers["content-type"] = "application/json";
  const answer = await fetch(path, body ? { method: "POST", headers, body: JSON.stringify(body) } : { headers }).catch(() => {
    throw new Error("The server does not answer. The answers given before are stored. Once it runs again, reload this page: it goes on with the first pair that has no answer.");
  });
  if (answer.ok) return answer;
  const about = await answer.json().catch(() => null);
  if (answer.status === 401 && at("secret")) at("secret").hidden = false;
  throw Object.assign(new Error(about?.detail ?? `The server answered with status ${answer.status}.`), { status: answer.status });
}

const make = (tag, text = "", properties = {}) => Object.assign(document.createElement(tag), { textContent: text }, properties);
const film = (src, controls) => make("video", "", { src, controls, loop: true, muted: true, autoplay: true, playsInline: true });

async function medium(path, label) {
  const drawn = path.startsWith("data:"), blob = drawn ? null : await (await request(path)).blob();
  const url = drawn ? path : URL.createObjectURL(blob), moves = blob?.type.startsWith("video/");
  if (!drawn) urls.push(url);
  const element = moves ? film(url, true) : make("img", "", { alt: label, src: url });
  await new Promise((done, failed) => {
    element.addEventListener(moves ? "loadeddata" : "load", done);
    element.addEventListener("error", () => failed(new Error(`The browser cannot show the ${label}.`)));
  });
  if (!moves) {
    if (!drawn && Math.max(element.naturalWidth, element.naturalHeight) <= 256) {
      element.className = "small";
      element.style.maxWidth = `${16 * element.naturalWidth}px`;
    }
    Object.assign(element, { tabIndex: 0, title: "Enlarge" });
  }
  return element;
}

async function shownSample(content, label) {
  const side = make("div", "", { className: "side" });
  if (content.media) side.append(await medium(content.media, label));
  if (content.text !== null) side.append(make("pre", content.text));
  return side;
}
