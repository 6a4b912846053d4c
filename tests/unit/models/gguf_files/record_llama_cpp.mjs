// Asks llama.cpp about the files that `python -m tests.unit.models.gguf_files.writer DIRECTORY` wrote, and prints the answers:
//   npm install node-llama-cpp@3.22.1 && node tests/unit/models/gguf_files/record_llama_cpp.mjs DIRECTORY > tests/unit/models/gguf_files/llama_cpp.json
// Tokens of greedy continuations, and token ids of texts without a beginning token.
import fs from "node:fs";
import {createRequire} from "node:module";
import path from "node:path";
import {pathToFileURL} from "node:url";

const require = createRequire(path.join(process.cwd(), "package.json"));
const {getLlama} = await import(pathToFileURL(require.resolve("node-llama-cpp")));
const directory = process.argv[2];
const asked = JSON.parse(fs.readFileSync(path.join(directory, "asked.json"), "utf8"));
const llama = await getLlama({gpu: false, logLevel: "error"});
const answers = {};
for (const [name, {prompt, num_tokens: count, texts}] of Object.entries(asked)) {
    const model = await llama.loadModel({modelPath: path.join(directory, `${name}.gguf`)});
    if (texts) {
        answers[name] = texts.map((text) => model.tokenize(text, true));
    } else {
        const context = await model.createContext({contextSize: 256, threads: 1, flashAttention: false});
        const tokens = [];
        for await (const token of context.getSequence().evaluate(prompt, {temperature: 0, yieldEogToken: true})) {
            tokens.push(token);
            if (tokens.length == count)
                break;
        }
        answers[name] = tokens;
        await context.dispose();
    }
    await model.dispose();
}
const lines = Object.entries(answers).map(([name, answer]) => `  ${JSON.stringify(name)}: ${JSON.stringify(answer)}`);
console.log(`{\n${lines.join(",\n")}\n}`);
process.exit(0);
