// The order of search results: pages whose title has the words of the question first, how-tos before references.
const asked = (new URLSearchParams(window.location.search).get("q") || "").toLowerCase().match(/\w{3,}/g) || [];

var Scorer = {
  score: ([page, title, , , score]) => {
    const [named] = title.toLowerCase().split(" > ", 1); // without the heading within the page
    const found = asked.filter((word) => named.includes(word.replace(/s$/, "")));
    return score + (asked.length ? (20 * found.length) / asked.length : 0) + (page.startsWith("how-to/") ? 3 : 0);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
