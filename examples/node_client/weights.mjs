// A version of the weights, fetched whole and verified as the comments of weights.proto say.
import { createXXHash128, xxhash3, xxhash128 } from 'hash-wasm';
import { stream, unary } from './quartet.mjs';

const number = async (bytes) => BigInt(`0x${await xxhash3(bytes)}`);
const be64 = (value) => Buffer.from(BigInt(value).toString(16).padStart(16, '0'), 'hex');
const words = (Kind, values = []) => Buffer.from(Kind.from(values).buffer);
const check = (what, right) => { if (!right) throw new Error(`${what} is not what its publisher declared`); };

export async function checkManifest(manifest) {
  const { tensors, canary } = manifest;
  const layout = tensors.map(({ name, dtype, shape }) => [name, dtype, shape.join(','), ''].join('\0'));
  const parts = tensors.flatMap(({ digest }, at) => [Buffer.from(layout[at]), be64(digest)]);
  const digest = await xxhash128(Buffer.concat([...parts, Buffer.from(manifest.adapter_config)]));
  check('digest', digest === manifest.digest.toString('hex'));
  check('layout', (await xxhash128(Buffer.from(layout.join('')))) === manifest.layout_signature);
  const said = [manifest.run_id, manifest.version, '', manifest.payload_bytes, ''].join('\0'); // '': no base was named
  const dense = Buffer.alloc(tensors.length, 1); // TENSOR_ENCODING_DENSE of each
  const rest = [manifest.digest, dense, words(Uint32Array, canary?.token_ids), words(Float32Array, canary?.logprobs)];
  check('checksum', (await number(Buffer.concat([Buffer.from(said), ...rest]))) === BigInt(manifest.checksum));
}

// A safetensors file.
export async function fetchWeights(weights, run_id, version) {
  const { manifest } = await unary(weights, 'GetManifest', { run_id, version });
  await checkManifest(manifest);
  const [chunks, whole] = [[], await createXXHash128()];
  let [at, end] = [0, null];
  for await (const frame of stream(weights, 'Fetch', { run_id, version: manifest.version })) {
    end = frame.end;
    if (!frame.chunk?.data.length) continue; // the end, or a relay that waits itself
    check('offset', Number(frame.chunk.offset) === at);
    check('chunk', (await number(frame.chunk.data)) === BigInt(frame.chunk.checksum));
    whole.update(frame.chunk.data);
    chunks.push(frame.chunk.data);
    at += frame.chunk.data.length;
  }
  const payload = Buffer.concat(chunks);
  check('size', end?.payload_bytes === manifest.payload_bytes && at === Number(end.payload_bytes));
  check('payload', whole.digest() === end.payload_digest.toString('hex'));
  const begin = 8 + Number(payload.readBigUInt64LE());
  const header = JSON.parse(payload.subarray(8, begin));
  for (const { name, digest } of manifest.tensors) {
    const [from, to] = header[name].data_offsets;
    check(name, (await number(payload.subarray(begin + from, begin + to))) === BigInt(digest));
  }
  return payload;
}
