// The organizer's view: progress, figures, disputed pairs and notes.
// The address has the token behind the '#', which browsers send to no server.
const bearer = () => decodeURIComponent(location.hash.slice(1));

async function act(work) {
  let text = "";
  await work().catch(error => text = error.message);
  at("message").textContent = text;
  at("message").hidden = !text;
}

const cell = value => value === null ? "" : typeof value === "number" && !Number.isInteger(value) ? value.toPrecision(3) : value === true ? "yes" : value === false ? "no" : String(value);
function table(title, rows) {
  if (!rows?.length) return [];
  const body = make("table"), head = make("tr");
  head.append(...Object.keys(rows[0]).map(name => make("th", name.replace("_", " "))));
  body.append(head, ...rows.map(row => {
    const line = make("tr");
    line.append(...Object.values(row).map(value => make("td", cell(value))));
    return line;
  }));
  const wider = make("div", "", { className: "wider" });
  wider.append(body);
  return [make("h2", title), wider];
}

async function dispute(pair) {
  const section = make("section", "", { className: "dispute" }), sides = make("div", "", { className: "sides" });
  for (const [number, vote] of ["first", "second"].entries()) {
    const raters = pair.votes.filter(each => each.vote === vote).map(each => each.rater).join(", "), content = await shownSample(pair.samples[number], vote);
    content.append(make("p", `Preferred by ${raters}`));
    sides.append(content);
  }
  const neither = pair.votes.filter(each => each.vote === "neither").map(each => each.rater);
  const notes = pair.votes.filter(each => each.note).map(each => `${each.rater}: ${each.note}`);
  section.append(make("h3", pair.prompt), sides, ...(neither.length ? [make("p", `Neither: ${neither.join(", ")}`)] : []), ...notes.map(text => make("p", text)));
  return section;
}

async function show() {
  const view = await (await request("api/organizer")).json(), old = urls;
  urls = [];
  const answered = view.progress.reduce((sum, row) => sum + row.raters * row.groups, 0);
  at("run").textContent = `Ratings of ${view.run}`;
  at("counts").textContent = `${view.question} - ${answered} answers to ${view.progress.reduce((sum, row) => sum + row.groups, 0)} ${view.task === "compare" ? "pairs" : "groups"}`;
  const links = (view.raters ?? []).map(row => ({ ...row, link: `${location.origin}/?rater=${encodeURIComponent(row.rater)}` }));
  const disputes = await Promise.all(view.disputed.map(dispute));
  at("figures").replaceChildren(
    ...table("Raters per pair", view.progress), ...table("Raters", links), ...table("Agreement", view.agreement), ...table("Win rates", view.wins),
    ...(disputes.length ? [make("h2", `Disputed: ${view.disputes}${view.disputes > disputes.length ? `, the ${disputes.length} most divided` : ""}`), ...disputes] : []),
    ...table("Notes", view.notes));
  if (!view.raters) at("figures").append(make("p", `No answers yet. Raters open ${location.origin}/?rater=NAME, each with a name of their own.`));
  old.forEach(URL.revokeObjectURL);
}

at("reload").onclick = () => act(show);
for (const button of document.querySelectorAll("[data-form]")) button.onclick = () => act(async () => {
  const blob = await (await request(`api/organizer/export?form=${button.dataset.form}`)).blob();
  const link = make("a", "", { href: URL.createObjectURL(blob), download: `answers.${button.dataset.form}` });
  link.click();
  URL.revokeObjectURL(link.href);
});
act(show);
