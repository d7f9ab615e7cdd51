// Server-sent events of OpenAI-compatible servers: bytes in, classified events out. The twin of sloscope/sse.py, rule by
// rule; tests/client/test_browser_decoder.py holds the two against each other. No clock and no network.
//
// One difference: JavaScript has one kind of number, so a count that is written 5.0 is 5 here and none there.

export const MAX_BODY = 8 << 20; // bytes of one event, or of an answer that does not stream, that are looked at
const MAX_COUNT = 2 ** 31 - 1; // of tokens, and of choices
const LF = 10, CR = 13, SPACE = 32, COLON = 58;
const BOM = [0xef, 0xbb, 0xbf];
const UNNAMED_ERROR = "error event";
const ERROR_WORD = /^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$/;
const RANK = { content: 3, tool: 2, reasoning: 1 };
const utf8 = new TextDecoder("utf-8", { ignoreBOM: true });

function eventOf(fields) {
  return {
    outputs: [], finishes: [], usage: null, error: null, done: false, model: null,
    malformed: false, recognised: false, rawUsageOnly: false, ...fields,
  };
}

/** The body of one streamed response, cut anywhere, into events. The framing is that of sse.py, rule by rule. */
export class StreamDecoder {
  constructor(maxEventBytes = MAX_BODY) {
    this.oversized = 0;
    this.torn = false;
    this._max = maxEventBytes;
    this._bom = 0; // bytes of a BOM that have come; -1 past the start
    this._afterCr = false; // an LF that follows belongs to the line end before it
    this._line = new Uint8Array(256);
    this._size = 0; // of the line begun; of a comment or a skipped line, only its colon
    this._data = [];
    this._dataBytes = 0;
    this._named = this._isError = this._skipping = false;
  }

  feed(bytes) {
    const events = [];
    let begin = this._bom >= 0 ? this._start(bytes) : 0;
    for (let i = begin; i < bytes.length; i++) {
      const byte = bytes[i];
      if (byte === LF && this._afterCr) {
        this._afterCr = false;
        begin = i + 1;
        continue;
      }
      this._afterCr = byte === CR;
      if (byte === LF || byte === CR) {
        this._keep(bytes.subarray(begin, i));
        this._endLine(events);
        begin = i + 1;
      }
    }
    this._keep(bytes.subarray(begin));
    return events;
  }

  /** End of stream: the last event if it is whole though no blank line closed it. */
  finish() {
    const line = this._line.slice(0, this._size);
    this._size = 0;
    const named = utf8.decode(line.subarray(0, 6));
    if (named.startsWith("data:") || named.startsWith("error:")) {
      this._field(line);
    } else if (this._bom > 0 || (line.length > 0 && line[0] !== COLON)) {
      this.torn = true;
    }
    const data = joined(this._data);
    let event = decodeEvent(data, this._isError);
    const isWhole = event !== null && (event.recognised || !event.malformed);
    if (!isWhole || strip(data).length === 0) {
      this.torn ||= this._data.length > 0 || this._named || this._skipping;
      event = this._isError ? eventOf({ error: UNNAMED_ERROR, recognised: true }) : null;
    }
    this._endEvent();
    this._skipping = false;
    return event === null ? [] : [event];
  }

  /** Past a BOM, or the part of one that has come. Where it was none, its bytes begin the first line. */
  _start(bytes) {
    for (let i = 0; i < bytes.length; i++) {
      if (bytes[i] !== BOM[this._bom]) {
        this._keep(Uint8Array.from(BOM.slice(0, this._bom)));
        this._bom = -1;
        return i;
      }
      this._bom += 1;
      if (this._bom === BOM.length) {
        this._bom = -1;
        return i + 1;
      }
    }
    return bytes.length;
  }

  _keep(begun) {
    if (begun.length === 0) return;
    const isComment = (this._size > 0 ? this._line[0] : begun[0]) === COLON;
    const size = this._size + begun.length;
    if (isComment || size > this._max) {
      if (!isComment) this._skipEvent();
      this._line[0] = COLON;
      this._size = 1;
      return;
    }
    if (size > this._line.length) {
      const longer = new Uint8Array(2 * size);
      longer.set(this._line.subarray(0, this._size));
      this._line = longer;
    }
    this._line.set(begun, this._size);
    this._size = size;
  }

  _endLine(events) {
    const line = this._line.subarray(0, this._size);
    this._size = 0;
    if (line.length > 0) {
      this._field(line);
      return;
    }
    if (this._data.length > 0 || this._isError) {
      const event = decodeEvent(joined(this._data), this._isError);
      if (event !== null) events.push(event);
    }
    this._endEvent();
    this._skipping = false;
  }

  _field(line) {
    if (line[0] === COLON || this._skipping) return;
    const colon = line.indexOf(COLON);
    const name = utf8.decode(colon < 0 ? line : line.subarray(0, colon));
    let value = colon < 0 ? new Uint8Array(0) : line.slice(colon + 1);
    if (value[0] === SPACE) value = value.subarray(1);
    if (name === "event") {
      this._named = true;
      this._isError = utf8.decode(value) === "error";
      return;
    }
    if (name === "error") {
      this._isError = true;
    } else if (name !== "data") {
      return;
    }
    this._dataBytes += value.length + (this._data.length > 0 ? 1 : 0); // a newline joins two data lines
    this._data.push(value);
    if (this._dataBytes > this._max) this._skipEvent();
  }

  _endEvent() {
    this._data = [];
    this._dataBytes = 0;
    this._named = this._isError = false;
  }

  _skipEvent() {
    if (this._skipping) return;
    this._skipping = true;
    this.oversized += 1;
    this._endEvent();
  }
}

/** The body of a response that did not stream, under the same rules. */
export function parseBody(bytes) {
  return classify(parse(BOM.every((byte, i) => bytes[i] === byte) ? bytes.subarray(3) : bytes), false);
}

function joined(lines) {
  if (lines.length === 1) return lines[0];
  const whole = new Uint8Array(lines.reduce((size, line) => size + line.length + 1, 0));
  let at = 0;
  for (const line of lines) {
    whole.set(line, at);
    at += line.length;
    whole[at++] = LF;
  }
  return whole.subarray(0, Math.max(0, at - 1));
}

function strip(bytes) {
  const isBlank = (byte) => byte === SPACE || (byte >= 9 && byte <= 13);
  let from = 0, to = bytes.length;
  while (from < to && isBlank(bytes[from])) from++;
  while (to > from && isBlank(bytes[to - 1])) to--;
  return bytes.subarray(from, to);
}

function decodeEvent(data, isError) {
  const word = strip(data);
  const error = isError ? UNNAMED_ERROR : null;
  if (word.length === 0) return isError ? eventOf({ error, recognised: true }) : null;
  if (data.length < 16 && utf8.decode(word) === "[DONE]") return eventOf({ error, done: true, recognised: true });
  return classify(parse(data), isError);
}

/** undefined: no JSON. Python servers write NaN and Infinity, which hide no output. */
function parse(bytes) {
  const text = utf8.decode(bytes);
  try {
    return JSON.parse(text);
  } catch {
    try {
      // A string is matched first, so that what stands in it is left alone. 1e999 is read as Infinity.
      const number = (word) => (word[0] === '"' ? word : word.replace(/NaN|Infinity/, "1e999"));
      return JSON.parse(text.replace(/"(?:[^"\\]|\\.)*"?|-?Infinity|NaN/gs, number));
    } catch {
      return undefined;
    }
  }
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const isText = (value) => typeof value === "string" && value !== "";
const isInt = (value, most) => Number.isInteger(value) && Math.abs(value) <= most;

/** Whether there is anything in it: an empty list or object is nothing. */
function isFilled(value) {
  if (Array.isArray(value)) return value.length > 0;
  return isObject(value) ? Object.keys(value).length > 0 : Boolean(value);
}

function classify(obj, isError) {
  if (!isObject(obj)) return eventOf({ error: isError ? UNNAMED_ERROR : null, malformed: true });
  let usage = usageOf(obj.usage);
  if (usage === null && isObject(obj.x_groq)) usage = usageOf(obj.x_groq.usage);
  let error = null;
  if (isFilled(obj.error)) error = errorClass(obj.error, obj);
  else if (isError) error = errorClass(obj);

  const isList = Array.isArray(obj.choices), isNone = obj.choices === undefined || obj.choices === null;
  if (isNone && error === null && obj.object === "error") error = errorClass(obj);
  const choices = isList ? obj.choices : [];
  let malformed = !isList && !isNone;

  const kinds = new Map();
  const finishes = [];
  choices.forEach((choice, position) => {
    if (!isObject(choice)) {
      malformed = true;
      return;
    }
    const index = isInt(choice.index, MAX_COUNT) && choice.index >= 0 ? choice.index : position;
    const { delta } = choice;
    let kind = null;
    if (isObject(delta)) kind = kindOf(delta);
    else if (delta !== undefined && delta !== null) malformed = true;
    // Only without a delta: beside one it repeats it, or sums up what was streamed before.
    else if (isObject(choice.message)) kind = kindOf(choice.message);
    if (isText(choice.text)) kind = "content";
    // Two entries of one choice in one event are still one output event of that choice.
    if (kind !== null && (!kinds.has(index) || RANK[kind] > RANK[kinds.get(index)])) kinds.set(index, kind);
    if (isText(choice.finish_reason)) finishes.push([index, choice.finish_reason]);
    if (error === null && isFilled(choice.error)) error = errorClass(choice.error);
    usage ??= usageOf(choice.usage);
  });

  return eventOf({
    outputs: [...kinds],
    finishes,
    usage,
    error,
    model: isText(obj.model) ? obj.model : null,
    malformed,
    recognised: "choices" in obj || "error" in obj,
    rawUsageOnly: usage !== null && choices.length === 0 && !malformed && "choices" in obj,
  });
}

function kindOf(delta) {
  const { content } = delta;
  const kind = Array.isArray(content) ? kindOfParts(content) : isText(content) ? "content" : null;
  if (kind === "content" || isText(delta.refusal)) return "content";
  if (hasArguments(delta.tool_calls) || hasArguments(delta.function_call)) return "tool";
  return kind !== null || isText(delta.reasoning_content) || isText(delta.reasoning) ? "reasoning" : null;
}

/** Content as a list of typed parts, which Mistral's reasoning models stream. */
function kindOfParts(parts) {
  let kind = null;
  for (const part of parts.filter(isObject)) {
    if (isText(part.text) || isText(part.refusal)) return "content";
    const thoughts = Array.isArray(part.thinking) ? part.thinking.filter(isObject) : [part];
    if (thoughts.some((thought) => isText(isFilled(thought.text) ? thought.text : thought.thinking))) {
      kind = "reasoning";
    }
  }
  return kind;
}

/** Argument text in tool calls (a list, or a bare object) or a function call; the name alone is no output. */
function hasArguments(calls) {
  return (Array.isArray(calls) ? calls : [calls]).filter(isObject).some((call) => {
    const held = "function" in call ? call.function : call;
    const given = isObject(held) ? held.arguments : null;
    return isText(given) || (isObject(given) && isFilled(given));
  });
}

function usageOf(value) {
  if (!isObject(value)) return null;
  const [prompt, completion] = [value.prompt_tokens, value.completion_tokens].map((count) =>
    isInt(count, MAX_COUNT) && count >= 0 ? count : null,
  );
  return prompt === null && completion === null ? null : { prompt, completion };
}

/** The first code, else type, that stands in `places`. Message text is never looked at. */
function errorClass(...places) {
  for (const place of places.filter(isObject)) {
    for (const value of [place.code, place.type, place.error_type]) {
      if (isInt(value, 1e9 - 1)) return String(value);
      // {"type": "error"} says no more than that it is one.
      if (typeof value === "string" && value !== "error" && ERROR_WORD.test(value)) return value;
    }
  }
  return UNNAMED_ERROR;
}
