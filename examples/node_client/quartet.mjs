// Clients of Quartet's services, calls that may be repeated, and errors with what they carry.
import { readFileSync } from 'node:fs';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import grpc from '@grpc/grpc-js';
import loader from '@grpc/proto-loader';
import google from 'google-proto-files';

const protos = fileURLToPath(new URL('../../protos', import.meta.url));
const options = { keepCase: true, longs: String, enums: String, defaults: true, oneofs: true };
const files = ['trainer_service', 'inference_service', 'weights'].map((name) => `quartet/v1/${name}.proto`);
const { v1 } = grpc.loadPackageDefinition(loader.loadSync(files, { ...options, includeDirs: [protos] })).quartet;
const rpc = ['status', 'error_details'].map((name) => google.getProtoPath('rpc', `${name}.proto`));
const details = google.loadSync(rpc);

// A stub of `service`, such as "TrainerService". With TLS where the authority's file is named.
export function client(service, address, { token, ca } = {}) {
  const credentials = ca ? grpc.credentials.createSsl(readFileSync(ca)) : grpc.credentials.createInsecure();
  const stub = new v1[service](address, credentials, { 'grpc.keepalive_time_ms': 20_000 });
  stub.service = service;
  stub.token = token && readFileSync(token, 'utf8').trim();
  return stub;
}

export class QuartetError extends Error {
  constructor(error) {
    super(error.details);
    Object.assign(this, { code: error.code, reason: grpc.status[error.code], metadata: {}, retryMs: 0 });
    const [packed] = error.metadata?.get('grpc-status-details-bin') ?? [];
    const status = packed && details.lookupType('google.rpc.Status').decode(packed);
    for (const { type_url, value } of status?.details ?? []) {
      const name = type_url.split('/').pop();
      const one = details.lookupType(name).decode(value);
      if (name === 'google.rpc.ErrorInfo') Object.assign(this, { reason: one.reason, metadata: one.metadata });
      if (name === 'google.rpc.RetryInfo') this.retryMs = Number(one.retryDelay.seconds) * 1000 + one.retryDelay.nanos / 1e6;
    }
    this.message = `${this.reason}: ${error.details}`;
  }
}

// Waits until the service listens: one that was started a moment ago imports its libraries first.
export function ready(stub, seconds = 300) {
  const where = `${stub.service} at ${stub.getChannel().getTarget().replace(/^dns:/, '')}`;
  const late = setTimeout(() => console.error(`waiting for ${where}`), 2000);
  return new Promise((resolve, reject) => {
    stub.waitForReady(Date.now() + seconds * 1000, (error) => {
      clearTimeout(late);
      error ? reject(new Error(`${where} is not there after ${seconds} s: ${error.message}`)) : resolve();
    });
  });
}

const withToken = ({ token }) => grpc.Metadata.fromHttp2Headers(token ? { authorization: `Bearer ${token}` } : {});
const PASSING = [grpc.status.UNAVAILABLE, grpc.status.RESOURCE_EXHAUSTED, grpc.status.DEADLINE_EXCEEDED];

// What may be repeated, repeated: a call of a run with its seq_id, or one that only reads.
export async function repeated(once, tries = 8) {
  for (let wait = 250; ; wait *= 2) {
    try {
      return await once();
    } catch (error) {
      if (!PASSING.includes(error.code) || error.message.includes('larger than max') || --tries === 0) throw error;
      console.error(`${error.message}; trying again`);
      await sleep(error.retryMs || wait);
    }
  }
}

export function unary(stub, method, request, seconds = 300) {
  return repeated(() => new Promise((resolve, reject) => {
    const ends = (error, answer) => error ? reject(new QuartetError(error)) : resolve(answer);
    stub[method](request, withToken(stub), { deadline: Date.now() + seconds * 1000 }, ends);
  }));
}

// `frames` makes the frames anew for each try. A refusal may come before the last frame.
export function upload(stub, method, frames, seconds = 300) {
  return repeated(() => new Promise((resolve, reject) => {
    let over = false;
    const ends = (error, answer) => { over = true; call.emit('drain'); error ? reject(new QuartetError(error)) : resolve(answer); };
    const call = stub[method](withToken(stub), { deadline: Date.now() + seconds * 1000 }, ends);
    (async () => {
      for (const frame of frames()) if (!over && !call.write(frame)) await new Promise((drained) => call.once('drain', drained));
      if (!over) call.end();
    })();
  }));
}

// The messages of an answer that is a stream; to leave it early ends the call.
export async function* stream(stub, method, request, seconds = 300) {
  const call = stub[method](request, withToken(stub), { deadline: Date.now() + seconds * 1000 });
  try {
    yield* call;
  } catch (error) {
    throw new QuartetError(error);
  } finally {
    call.on('error', () => {});
    call.cancel();
  }
}
