// Ask the search of a built site, as a browser does: its own worker, over its own index.
// Arguments: the folder of the site, and queries. Prints, as JSON, the pages found for each.
const fs = require("fs"), path = require("path");
const [site, ...queries] = process.argv.slice(2);
const answers = [];
let hear;
globalThis.self = globalThis;
globalThis.addEventListener = (kind, listener) => {
    if (kind == "message") hear = listener;
};
globalThis.postMessage = message => answers.push(message);
const workers = path.resolve(site, "assets/javascripts/workers");
require(path.join(workers, fs.readdirSync(workers).find(name => name.endsWith(".js"))));

const [SETUP, QUERY] = [0, 2];
(async () => {
    const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json")));
    const data = { config: index.config, docs: index.docs, options: { suggest: true } };
    await hear({ data: { type: SETUP, data } });
    const found = {};
    for (const query of queries) {
        await hear({ data: { type: QUERY, data: query } });
        const { items } = answers.at(-1).data;
        found[query] = items.map(parts => {
            const best = parts.reduce((a, b) => (a.score >= b.score ? a : b));
            return best.location;
        });
    }
    console.log(JSON.stringify(found));
})();
