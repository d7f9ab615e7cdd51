// Receipts of a browser: what a reader of streamed answers got and when, reported to a sidecar's control address.
//
//     import { receiptFetch } from "./sloscope.js";
//     const fetch = receiptFetch({ receipts: "http://127.0.0.1:9464" });
//     const answer = await fetch("/v1/chat/completions", { method: "POST", body: … });
//
// The twin of sloscope/client/transport.py. A read is stamped when it returns, before anything is parsed, and is parsed
// after it was handed on. The stream pulls only when its reader pulls; the time in between is `consumer_hold_ns`. Text
// is parsed and dropped. Nothing that goes wrong here reaches the page: it is counted in `stats()`.

import { Answer, MAX_CHOICES } from "./answer.js";
import { MAX_BODY } from "./sse.js";

const LEFT = ["voluntary", "client_timeout", "disconnect"];
const LIMITS = ["ttft", "ttft_visible", "itl_max", "tpot", "e2e"];
const ID_HEADER = "x-sloscope-request-id";
const RETRY_HEADER = "x-sloscope-retry-of";
const RETRY_COUNT = "x-stainless-retry-count"; // the openai package counts its retries here
const REQUEST_ID = /^[0-7][0-9A-HJKMNP-TV-Z]{25}$/;
const OPTIONS = ["receipts", "token", "class", "tenant", "labels", "sendId", "fetch"];
const POST_EVERY_MS = 1000;
const MAX_BACKOFF_MS = 60_000; // between two attempts to reach a control address that does not answer
const MAX_WAITING = 1000; // receipts; beyond it the oldest is given up
const MAX_POST = 1 << 20; // bytes of a post, unless one receipt is longer
const MAX_LEAVING = 60_000; // bytes: browsers let a page that closes leave 64 KiB behind
const PROBE_EVERY_MS = 20;
const CLOSING_MS = 200; // within which a page that broke off a stream by closing says that it closes
const AFTER_DONE_MS = 1000; // a reader may leave a stream at [DONE] and never see its end
const MAX_ANCHOR_DRIFT_MS = 50;

const counted = { requests: 0, reported: 0, rejected: 0, lost: 0, unjoined: 0, observerErrors: 0, lastError: "" };

/**
 * What was observed so far by all of the page's `receiptFetch`es.
 *
 * requests: calls watched. reported: receipts that the control address took, or that were left behind by a page that
 * closes. rejected: refused there. lost: never arrived there. unjoined: dropped, for want of an id that the sidecar
 * knows (see `sendId`). observerErrors: of ours. lastError: why the last one was refused, lost or an error.
 */
export function stats() {
  return { ...counted };
}

/**
 * A `fetch` that does what the given one does and reports each POST to a path that ends in `/completions`.
 *
 * receipts: URL of the sidecar's control address, or a path of the page's own origin that leads there.
 * token: its bearer token. Everybody who can open the page can read it.
 * class, tenant, labels: kept with each request; the headers x-slo-class and x-slo-tenant of a request win.
 * sendId: whether a request gets an x-sloscope-request-id. By default only within the page's origin: elsewhere the
 *   browser asks the server whether it takes the header, and stops the request if not. The id is then read from the
 *   response.
 * fetch: the function that does the work; by default the browser's.
 *
 * Throws a TypeError here for options that are not accepted, and nothing of its own afterwards.
 */
export function receiptFetch(options) {
  for (const name of Object.keys(options ?? {})) {
    if (!OPTIONS.includes(name)) throw new TypeError(`${name}: no such option; accepted: ${OPTIONS.join(", ")}`);
  }
  if (typeof options?.receipts !== "string" || !URL.canParse(options.receipts, baseUrl())) {
    throw new TypeError(`receipts: ${options?.receipts} is not accepted; accepted: a URL`);
  }
  const inner = (options.fetch ?? globalThis.fetch).bind(globalThis);
  const reporter = new Reporter(options, inner);
  return (input, init) => {
    const sendNs = now();
    const call = guard(() => reporter.begin(sendNs, input, init));
    return call ? watched(call, inner, input) : inner(input, init);
  };
}

async function watched(call, inner, input) {
  let response;
  try {
    response = await inner(input, call.init);
  } catch (error) {
    call.over(call.signal?.aborted ? "eof" : "connect_error");
    throw error;
  }
  return guard(() => call.responded(response)) ?? response;
}

function guard(act) {
  try {
    return act();
  } catch (error) {
    counted.observerErrors += 1;
    counted.lastError = String(error);
    return undefined;
  }
}

/** Integer nanoseconds since the page began. Browsers round it, to 5 µs at best and 100 µs as a rule. */
function now() {
  return Math.round(performance.now() * 1e6);
}

const baseUrl = () => globalThis.document?.baseURI ?? globalThis.location?.href;
const isHidden = () => globalThis.document?.visibilityState === "hidden";

// --- one call -------------------------------------------------------------------------------------------------

class Call {
  constructor(reporter, begun, answer, { init, signal, sendsId }) {
    this.init = init;
    this.signal = signal;
    this.sendNs = begun.send_ns;
    this.isHidden = isHidden();
    this._reporter = reporter;
    this._begun = begun; // fields of the receipt that the request tells
    this._answer = answer;
    this._reads = []; // [stamp, bytes] not yet parsed
    this._end = null;
    this._holdNs = null;
    this._heldSinceNs = null;
    this._lagNs = 0;
    this._knowsId = sendsId; // that the request has at the sidecar
    this._countsBytes = false;
  }

  /** The response for the caller: the same but for its body, which passes through us. */
  responded(response) {
    const { status, type } = response;
    if (status === 0) {
      this._reporter.forget(this); // opaque: nothing of it can be read, by the page either
      return response;
    }
    const id = response.headers.get(ID_HEADER) ?? "";
    if (REQUEST_ID.test(id)) {
      this._begun.request_id = id;
      this._knowsId = true;
    }
    this._answer.response(status, response.headers.get("content-type") ?? "");
    // What is decoded on its way, or may be, is not what was sent.
    this._countsBytes = type === "basic" && !response.headers.has("content-encoding");
    if (status >= 300 || response.body === null) {
      this.over("eof"); // its body says no more, and the page may never read it
      return response;
    }
    this._heldSinceNs = now(); // from here on it can be read
    return likeness(new Response(this._through(response.body.getReader()), response), response);
  }

  _through(reader) {
    let isPulling = false, isAtEnd = false;
    const end = (controller) => {
      this.over("eof");
      controller.close();
      controller.byobRequest?.respond(0);
    };
    const source = {
      type: "bytes",
      start: (controller) => {
        reader.closed.then(
          () => {
            // A stream counts as closed before the last read has brought what was left in it.
            isAtEnd = true;
            if (!isPulling) end(controller);
          },
          (error) => {
            this.over("reset");
            controller.error(error);
          },
        ).catch(() => {}); // the caller cancelled before
      },
      pull: async (controller) => {
        if (this._heldSinceNs !== null) this._holdNs = (this._holdNs ?? 0) + now() - this._heldSinceNs;
        this._heldSinceNs = null;
        isPulling = true;
        let read;
        do read = await reader.read();
        while (!read.done && read.value.byteLength === 0);
        const tNs = now();
        isPulling = false;
        if (!read.done) {
          guard(() => this._read(tNs, read.value));
          controller.enqueue(read.value);
          this._heldSinceNs = now();
        }
        if (read.done || isAtEnd) end(controller);
      },
      cancel: (reason) => {
        this.over("eof", whyLeft(reason));
        return reader.cancel(reason);
      },
    };
    try {
      return new ReadableStream(source, { highWaterMark: 0 });
    } catch {
      // Not every browser has streams of bytes; then its own response's is none either.
      return new ReadableStream({ ...source, type: undefined }, { highWaterMark: 0 });
    }
  }

  _read(tNs, bytes) {
    this._reads.push([tNs, bytes.slice()]); // the caller may give its buffer away
    if (this._reads.length === 1) later(() => this._parse());
  }

  _parse() {
    const wasDone = this._answer.doneNs !== null;
    for (const [tNs, bytes] of this._reads.splice(0)) this._answer.receive(tNs, bytes);
    if (!wasDone && this._answer.doneNs !== null) setTimeout(() => this.over("eof"), AFTER_DONE_MS);
  }

  /** The call ended; the first to say so decides. Its receipt is written a little later. */
  over(transport, left = "") {
    if (this._end !== null) return;
    const endNs = now();
    this._end = { transport, left: this.signal?.aborted && !left ? whyLeft(this.signal.reason) : left, endNs };
    guard(() => {
      this.lagged(this._reporter.overdueNs(endNs), endNs);
      if (this._isBroken()) setTimeout(() => guard(() => this._settle()), CLOSING_MS);
      else later(() => this._settle());
    });
  }

  /** The page goes. A browser may break off its streams before it says so. */
  leave() {
    this.over("eof", "disconnect");
    if (this._isBroken()) this._end = { ...this._end, transport: "eof", left: "disconnect" };
    guard(() => this._settle());
  }

  _isBroken() {
    return this._end.transport !== "eof" && !this._end.left;
  }

  /** The loop was late by so much just now. */
  lagged(lateNs, atNs) {
    // A browser slows a hidden page's timers, which is no lag of its loop.
    if (this.isHidden) this._lagNs = null;
    else this._lagNs = Math.max(this._lagNs, Math.min(lateNs, atNs - this.sendNs));
  }

  _settle() {
    if (!this._reporter.forget(this)) return;
    this._parse();
    const { transport, left, endNs } = this._end;
    const answer = this._answer;
    answer.finish(transport === "eof" && !left);
    const [outcome, reason] = answer.classify(transport, left);
    // A sidecar that gave the request an id of its own has counted it, and would count ours beside it.
    if (!this._knowsId && transport !== "connect_error") {
      counted.unjoined += 1;
      return;
    }
    if (this.isHidden) this._begun.labels = { ...this._begun.labels, page_hidden: true };
    this._reporter.add({
      ...this._begun,
      ...answer.fields(),
      outcome,
      reason,
      end_ns: answer.endNs(endNs),
      consumer_hold_ns: this._holdNs ?? undefined,
      loop_lag_max_ns: this._lagNs ?? undefined,
      bytes: this._countsBytes ? answer.bytes : undefined,
    });
  }
}

/** What the constructor of Response cannot be told. */
function likeness(copy, response) {
  const { url, type, redirected } = response;
  return Object.defineProperties(copy, {
    url: { value: url },
    type: { value: type },
    redirected: { value: redirected },
    clone: { value: () => likeness(Response.prototype.clone.call(copy), response) },
  });
}

/** Why a reader left, by the reason it gave to `abort` or `cancel`: its word, a timeout, or else it had enough. */
function whyLeft(reason) {
  if (LEFT.includes(reason)) return reason;
  return reason?.name === "TimeoutError" ? "client_timeout" : "voluntary";
}

// A message comes after what the page does with a read, and no browser holds it back as it does timers.
const acts = [];
let channel = null;

function later(act) {
  if (channel === null) {
    channel = new MessageChannel();
    channel.port1.onmessage = () => guard(acts.shift());
  }
  acts.push(act);
  channel.port2.postMessage(null);
}

// --- where receipts go ----------------------------------------------------------------------------------------

class Reporter {
  constructor({ receipts, token, class: className, tenant, labels, sendId }, inner) {
    this._url = `${new URL(receipts, baseUrl()).href.replace(/\/+$/, "")}/v1/receipts`;
    // Without a token a post is one that a browser sends unasked, as it does a beacon.
    this._headers = { "content-type": "text/plain;charset=UTF-8", ...(token && { authorization: `Bearer ${token}` }) };
    this._isOpen = !token;
    this._class = className;
    this._tenant = tenant;
    this._labels = labels;
    this._sendId = sendId;
    this._fetch = inner;
    this._clockId = `browser:${[...crypto.getRandomValues(new Uint8Array(8))]
      .map((byte) => byte.toString(16).padStart(2, "0"))
      .join("")}`;
    this._wallMs = performance.timeOrigin; // when the page's clock was 0
    this._calls = new Set();
    this._waiting = []; // receipts as JSON
    this._timer = null;
    this._isPosting = false;
    this._failures = 0; // in a row
    this._probeDueNs = null;
    globalThis.addEventListener?.("pagehide", () => guard(() => this._leave()));
    globalThis.document?.addEventListener("visibilitychange", () => guard(() => this._shownOrHidden()));
  }

  /** null: this is no request for completions. */
  begin(sendNs, input, init) {
    const request = input instanceof Request ? input : null;
    const url = new URL(request ? request.url : input, baseUrl());
    const method = init?.method ?? request?.method ?? "GET";
    if (method.toUpperCase() !== "POST" || !/\/completions\/*$/.test(url.pathname)) return null;
    const headers = new Headers(init?.headers ?? request?.headers);
    const own = headers.get(ID_HEADER) ?? "";
    const retryOf = headers.get(RETRY_HEADER) ?? "";
    const retries = Number(headers.get(RETRY_COUNT)) || 0;
    // The openai package repeats its caller's headers on a retry; an id names one request only.
    const requestId = REQUEST_ID.test(own) && !retries && own !== retryOf ? own : newRequestId();
    const sendsId = headers.has(ID_HEADER) || (this._sendId ?? url.origin === globalThis.location?.origin);
    if (sendsId) headers.set(ID_HEADER, requestId);
    const asked = bodyOf(init?.body);
    const answer = new Answer(
      asked ? asked.stream === true : null,
      Math.min(positive(asked?.n) ?? 1, MAX_CHOICES),
    );
    const labels = { ...this._labels, ...(retries && { retry_count: retries }) };
    const begun = {
      request_id: requestId,
      clock_id: this._clockId,
      anchor: this._anchor(sendNs),
      send_ns: sendNs,
      class: headers.get("x-slo-class") ?? this._class,
      tenant: headers.get("x-slo-tenant") ?? this._tenant,
      model: typeof asked?.model === "string" ? asked.model.slice(0, 200) : undefined,
      max_tokens: positive(asked?.max_completion_tokens) ?? positive(asked?.max_tokens),
      external_id: headers.get("x-request-id")?.slice(0, 200),
      retry_of: REQUEST_ID.test(retryOf) ? retryOf : undefined,
      own_limits: ownLimits(headers),
      labels: Object.keys(labels).length > 0 ? labels : undefined,
    };
    const call = new Call(this, begun, answer, {
      init: sendsId ? { ...init, headers } : init,
      signal: init?.signal ?? request?.signal,
      sendsId,
    });
    counted.requests += 1;
    this._calls.add(call);
    if (this._probeDueNs === null) this._probe();
    return call;
  }

  /** Whether the call was still open. */
  forget(call) {
    return this._calls.delete(call);
  }

  add(receipt) {
    this._waiting.push(JSON.stringify(receipt));
    if (this._waiting.length > MAX_WAITING) {
      this._waiting.shift();
      this._lose(1, `more than ${MAX_WAITING} receipts wait`);
    }
    this._postIn(POST_EVERY_MS);
  }

  /** The page's clock stops in some browsers while the machine sleeps, and the wall clock is set now and then. */
  _anchor(monoNs) {
    const wallMs = Date.now() - monoNs / 1e6;
    if (Math.abs(wallMs - this._wallMs) > MAX_ANCHOR_DRIFT_MS) this._wallMs = wallMs;
    return { mono_ns: monoNs, wall_ns: Math.round(this._wallMs * 1e6) + monoNs };
  }

  /** A timer that runs over says by how much the page's loop was late. */
  _probe() {
    if (this._calls.size === 0) {
      this._probeDueNs = null;
      return;
    }
    this._probeDueNs = now() + PROBE_EVERY_MS * 1e6;
    setTimeout(() => {
      const atNs = now();
      for (const call of this._calls) call.lagged(this.overdueNs(atNs), atNs);
      this._probe();
    }, PROBE_EVERY_MS);
  }

  /** After a stall the browser may read its network before it runs its timers. */
  overdueNs(atNs) {
    return this._probeDueNs === null ? 0 : Math.max(0, atNs - this._probeDueNs);
  }

  _postIn(ms) {
    this._timer ??= setTimeout(() => {
      this._timer = null;
      guard(() => this._post());
    }, ms);
  }

  async _post() {
    if (this._isPosting || this._waiting.length === 0) return;
    this._isPosting = true;
    const batch = this._take(MAX_POST);
    const body = batchOf(batch);
    let status = 0, answer = null, afterMs = 0;
    try {
      const keepalive = body.length < MAX_LEAVING; // a page that closes meanwhile does not take it along
      const response = await this._fetch(this._url, { method: "POST", headers: this._headers, body, keepalive });
      status = response.status;
      afterMs = 1000 * (Number(response.headers.get("retry-after")) || 0); // a date is not what the sidecar says
      answer = await response.json();
    } catch (error) {
      counted.lastError = String(error);
    }
    this._isPosting = false;
    if (Array.isArray(answer?.rejected)) {
      counted.reported += batch.length - answer.rejected.length;
      counted.rejected += answer.rejected.length;
      counted.lastError = answer.rejected.at(-1)?.error ?? counted.lastError;
      this._failures = 0;
    } else if (status >= 400 && status < 500 && status !== 429) {
      this._lose(batch.length, answer?.error ?? `status ${status}`);
    } else {
      this._waiting.unshift(...batch);
      this._failures += 1;
    }
    const pauseMs = Math.max(POST_EVERY_MS * 2 ** this._failures, afterMs);
    if (this._waiting.length > 0) this._postIn(Math.min(pauseMs, MAX_BACKOFF_MS));
  }

  _take(most) {
    let count = 0;
    for (let size = 20; count < this._waiting.length; count++) {
      size += this._waiting[count].length + 1;
      if (size > most && count > 0) break;
    }
    return this._waiting.splice(0, count);
  }

  _lose(count, why) {
    counted.lost += count;
    counted.lastError = why;
  }

  _shownOrHidden() {
    if (!isHidden()) return;
    for (const call of this._calls) call.isHidden = true;
    // On a phone a hidden page may be ended without a word.
    this._post();
  }

  /** The page goes: what is open was left, and everything goes out at once. */
  _leave() {
    for (const call of [...this._calls]) call.leave();
    while (this._waiting.length > 0) {
      const batch = this._take(MAX_LEAVING);
      if (this._isPassedOn(batchOf(batch))) counted.reported += batch.length;
      else this._lose(batch.length, "the page closed");
    }
  }

  /** A beacon carries no headers, so a token goes with a fetch that outlives its page. */
  _isPassedOn(body) {
    if (this._isOpen && globalThis.navigator?.sendBeacon) return navigator.sendBeacon(this._url, body);
    if (body.length > MAX_LEAVING) return false;
    this._fetch(this._url, { method: "POST", headers: this._headers, body, keepalive: true }).catch(() => {});
    return true;
  }
}

const batchOf = (receipts) => `{"receipts":[${receipts.join(",")}]}`;

/** A fresh ULID: 48 bits of wall milliseconds, 80 random bits. */
function newRequestId() {
  const alphabet = "0123456789ABCDEFGHJKMNPQRSTVWXYZ";
  let text = "";
  for (let left = Date.now(), i = 0; i < 10; i++, left = Math.floor(left / 32)) text = alphabet[left % 32] + text;
  return text + Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => alphabet[byte & 31]).join("");
}

/** The request's body as an object; null where it cannot be read without taking it from the request. */
function bodyOf(body) {
  const text = body instanceof Uint8Array && body.length <= MAX_BODY ? new TextDecoder().decode(body) : body;
  if (typeof text !== "string" || text.length > MAX_BODY) return null;
  try {
    const asked = JSON.parse(text);
    return typeof asked === "object" && asked !== null ? asked : {};
  } catch {
    return {};
  }
}

/** Limits that the request carries itself. One that does not parse is the server's to refuse. */
function ownLimits(headers) {
  const limits = {};
  for (const name of LIMITS) {
    const text = headers.get(`x-slo-${name.replace("_", "-")}-ms`)?.trim() ?? "";
    const ns = /^\d+(\.\d+)?$/.test(text) ? Math.round(Number(text) * 1e6) : 0;
    if (ns > 0) limits[`${name}_ns`] = ns;
  }
  return Object.keys(limits).length > 0 ? limits : undefined;
}

const positive = (value) => (Number.isSafeInteger(value) && value > 0 ? value : undefined);
