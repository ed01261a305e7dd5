// Reinforcement learning from Node: a word is to be reversed. Sampled by inference, rewarded here, trained by the trainer.
import { writeFileSync } from 'node:fs';
import { parseArgs } from 'node:util';
import { client, ready, repeated, stream, unary, upload } from './quartet.mjs';
import { fetchWeights } from './weights.mjs';

const text = (value) => ({ type: 'string', default: value });
const { values: said } = parseArgs({ options: {
  trainer: text('localhost:50052'), inference: text('localhost:50053'), model: text('models/tiny'), run: text('node'),
  steps: text('20'), words: text('8'), members: text('8'), weights: text(''), token: text(''), ca: text(''),
} });
const run_id = said.run;
const [trainer, inference] = [client('TrainerService', said.trainer, said), client('InferenceService', said.inference, said)];
const SYSTEM = 'Reverse the text character-by-character. Put your answer in <reversed_text> tags.';

// The completions of one prompt, in exactly the tokens that were sampled.
async function completions(word, min_policy_version) {
  const messages = [{ role: 'system', content: SYSTEM }, { role: 'user', content: word }];
  const request = { run_id, messages: { messages }, sampling: { max_tokens: 13 }, n: Number(said.members), min_policy_version };
  let prompt = [];
  const found = Array.from({ length: request.n }, () => ({ token_ids: [], logprobs: [], spans: [], content: '' }));
  for await (const { start, delta, finish } of stream(inference, 'Generate', request)) {
    if (start) prompt = start.prompt_token_ids;
    if (delta) for (const key of ['token_ids', 'logprobs', 'spans']) found[delta.index][key].push(...delta[key]);
    if (finish) found[finish.index].content = finish.message.content;
  }
  const moved = (span) => ({ ...span, start: span.start + prompt.length }); // a sample counts from the prompt on
  return found.map((one) => ({ ...one, token_ids: [...prompt, ...one.token_ids], spans: one.spans.map(moved) }));
}

function reward(word, content) {
  const [wanted, answer] = [[...word].reverse(), /<reversed_text>(.*)<\/reversed_text>/s.exec(content)?.[1] ?? ''];
  return wanted.filter((letter, at) => letter === answer[at]).length / Math.max(wanted.length, answer.length);
}

function* frames(seq_id, samples) {
  const normalizer = samples.reduce((sum, { sample }) => sum + sample.logprobs.length, 0);
  yield { start: { run_id, seq_id, loss: { kind: 'LOSS_KIND_POLICY_GRADIENT' }, normalizer } };
  for (let at = 0; at < samples.length; at += 64) yield { batch: { samples: samples.slice(at, at + 64) } };
  const token_count = samples.reduce((sum, { sample }) => sum + sample.token_ids.length, 0);
  yield { commit: { sample_count: samples.length, token_count } };
}

await ready(trainer);
const spec = { base_model: said.model, optimizer: { learning_rate: 3e-4, max_grad_norm: 1 } };
const { run } = await unary(trainer, 'CreateRun', { run_id, spec });
let [seq, version] = [Number(run.applied_seq_id), Number(run.policy_version)]; // more than 0 where it goes on with a saved state
const next = (method, more) => unary(trainer, method, { run_id, seq_id: ++seq, ...more });
await next('PublishWeights');
await ready(inference);
while (version < Number(said.steps)) {
  const letters = () => Array.from({ length: 5 }, () => String.fromCharCode(97 + Math.floor(26 * Math.random()))).join('');
  const words = Array.from({ length: Number(said.words) }, letters);
  const groups = await Promise.all(words.map((word) => repeated(() => completions(word, version))));
  const rewards = groups.map((group, at) => group.map(({ content }) => reward(words[at], content)));
  const mean = (numbers) => numbers.reduce((sum, one) => sum + one, 0) / numbers.length;
  const samples = groups.flatMap((group, at) => group.map(({ token_ids, spans, logprobs }, member) => (
    { sample: { token_ids, spans, logprobs }, advantages: [rewards[at][member] - mean(rewards[at])] })));
  const seq_id = ++seq;
  const { loss } = await upload(trainer, 'ForwardBackward', () => frames(seq_id, samples));
  version = Number((await next('OptimStep')).policy_version);
  await next('PublishWeights');
  console.log(`step ${version}  reward ${mean(rewards.flat()).toFixed(3)}  loss ${loss.toFixed(4)}`);
}
const { state } = await next('SaveState', { name: 'last', export_model: true });
console.log(`model ${state.model_path}`);
if (said.weights) writeFileSync(said.weights, await fetchWeights(client('WeightService', said.inference, said), run_id, version));
await unary(trainer, 'CloseRun', { run_id });
