// One response as its reader got it: receipts, tokens and the end. The twin of sloscope/stream_record.py; whoever reads
// stamps the read and passes the stamp in.

import { MAX_BODY, StreamDecoder, parseBody } from "./sse.js";

export const MAX_CHOICES = 1024;
const TYPES = ["content", "reasoning", "tool"]; // as OUTPUT_TYPES in sloscope/records.py

export class Answer {
  constructor(streaming, nChoices) {
    this.streaming = streaming; // asked for; null: not known
    this.streamed = false; // came as events
    this.nChoices = nChoices;
    this.status = null;
    this.tNs = [];
    this.choice = [];
    this.type = [];
    this.tokens = [];
    this.promptTokens = null;
    this.bytes = 0;
    this.doneNs = null;
    this._events = 0;
    this._decoder = null;
    this._body = null;
    this._bodyIsTooLong = false;
    this._lastNs = 0;
    this._finishes = new Map();
    this._error = null;
    this._done = false;
    this._malformed = false;
    this._finalTokens = null;
    this._cumulative = new Map(); // choice → tokens so far as the server states them
    this._stated = 0; // the latest count of an event without output
  }

  response(status, contentType) {
    this.status = status;
    if (status >= 400) return;
    const kind = contentType.split(";")[0].trim().toLowerCase();
    // Not every server names its stream one.
    this.streamed = kind === "text/event-stream" || (this.streaming === true && kind !== "application/json");
    if (this.streamed) this._decoder = new StreamDecoder();
    else this._body = [];
  }

  receive(tNs, bytes) {
    this.bytes += bytes.length;
    this._lastNs = tNs;
    if (this._decoder !== null) {
      for (const event of this._decoder.feed(bytes)) this._event(tNs, event);
    } else if (this._body !== null) {
      this._body.push(bytes);
      if (this.bytes > MAX_BODY) {
        this._body = null;
        this._bodyIsTooLong = true;
      }
    }
  }

  _event(tNs, event) {
    const tokens = event.usage === null ? null : this._usage(event);
    for (const [choice, kind] of event.outputs) {
      this.tNs.push(tNs);
      this.choice.push(choice);
      this.type.push(TYPES.indexOf(kind));
      this.tokens.push(tokens);
    }
    const { finishes, done, error, recognised } = event;
    if (finishes.length > 0 || done || error !== null || !recognised) this._said(event);
    if (done) this.doneNs ??= tNs;
  }

  _said(event) {
    for (const [index, reason] of event.finishes) this._finishes.set(index, [...reason].slice(0, 64).join(""));
    this._error ??= event.error;
    this._done ||= event.done;
    this._malformed ||= event.malformed;
  }

  /** Tokens of this event. Final usage gives the request's, continuous usage those of each event. */
  _usage(event) {
    const { prompt, completion } = event.usage;
    this.promptTokens = prompt ?? this.promptTokens;
    if (completion === null) return null;
    const isOver = this._finishes.size >= this.nChoices;
    if (event.rawUsageOnly && (isOver || this._cumulative.size === 0)) {
      this._finalTokens = completion;
      return null;
    }
    if (this.nChoices === 1 && (event.finishes.length > 0 || isOver)) this._finalTokens = completion;
    if (event.outputs.length === 0 && this.nChoices === 1) this._stated = completion;
    if (event.outputs.length !== 1) return null;
    const [choice] = event.outputs[0];
    const count = completion - (this._cumulative.get(choice) ?? 0);
    if (count < 0) return null;
    this._cumulative.set(choice, completion);
    return count;
  }

  _counted() {
    return [...this._cumulative.values()].reduce((sum, count) => sum + count, 0);
  }

  finish(isComplete) {
    if (this._decoder !== null) {
      // What end of stream completes was received with the last read.
      for (const event of this._decoder.finish()) this._event(this._lastNs, event);
      if (this._finalTokens === null && this._done && this._stated > this._counted()) {
        // The usage came on an empty delta, and [DONE] instead of a finish reason.
        this._finalTokens = this._stated;
      }
    }
    this._events = this.tNs.length;
    if (this._body !== null && this._body.length > 0 && isComplete) {
      const whole = new Uint8Array(this.bytes);
      this._body.reduce((at, piece) => (whole.set(piece, at), at + piece.length), 0);
      const event = parseBody(whole);
      this._said(event);
      // Not every server names a finish reason; a whole answer with output in it ended properly.
      this._events = event.outputs.length;
      this._done = this._events > 0;
      if (event.usage !== null) {
        this.promptTokens = event.usage.prompt;
        this._finalTokens = event.usage.completion;
      }
    } else if (this._bodyIsTooLong) {
      this._done ||= isComplete;
      this._events += 1;
    }
    this._decoder = this._body = null;
  }

  /** [outcome, reason], by the order of definitions.classify_end. */
  classify(transport, left) {
    const { status } = this;
    if (transport === "connect_error") return ["failed", "connect_error"];
    if (status === 429 || status === 503) return ["failed", "rejected"];
    if (status === 408 || status === 504) return ["failed", "timeout"];
    if (status !== null && status >= 300) return ["failed", "http_error"];
    const failing = [...this._finishes.values()].some((reason) => reason === "abort" || reason === "error");
    if (this._error !== null || failing) return ["failed", "in_band_error"];
    if (this._done || this._finishes.size >= this.nChoices) {
      return this._events === 0 && !this._finalTokens ? ["failed", "empty_stream"] : ["completed", ""];
    }
    if (left) return ["cancelled", left];
    if (transport === "reset") return ["failed", "upstream_reset"];
    if (this._malformed) return ["failed", "bad_stream"];
    return ["failed", this._events === 0 ? "empty_stream" : "truncated"];
  }

  /** With [DONE] the end is the read that brought it, however late the connection ends. */
  endNs(endNs) {
    return this.doneNs === null ? endNs : Math.min(endNs, Math.max(this.doneNs, this.tNs.at(-1) ?? 0));
  }

  /** The part of a receipt that the response tells. Fields that are undefined are left out. */
  fields() {
    const size = this._finishes.size > 0 ? Math.min(Math.max(...this._finishes.keys()) + 1, MAX_CHOICES) : 0;
    const known = this.tNs.length > 0;
    let [outputTokens, tokenSource] = [this._finalTokens, "usage"];
    if (outputTokens === null && this._cumulative.size > 0) {
      outputTokens = this._counted();
      tokenSource = "continuous_usage";
    } else if (outputTokens === null && (known || this._events === 0)) {
      [outputTokens, tokenSource] = [this.tNs.length, "assumed_one"];
    }
    return {
      t_ns: known ? this.tNs : undefined,
      choice: this.choice.some((index) => index !== 0) ? this.choice : undefined,
      type: this.type.some((kind) => kind !== 0) ? this.type : undefined,
      tokens: this.tokens.some((count) => count !== null) ? this.tokens : undefined,
      finish_reason: size > 0 ? Array.from({ length: size }, (_, i) => this._finishes.get(i) ?? null) : undefined,
      prompt_tokens: this.promptTokens ?? undefined,
      output_tokens: outputTokens ?? undefined,
      token_source: outputTokens === null ? undefined : tokenSource,
      http_status: this.status ?? undefined,
      streaming: this.streaming ?? this.streamed,
      n_choices: this.nChoices,
    };
  }
}
