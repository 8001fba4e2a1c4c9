// The address of an earlier version: the whole client is in stream.js.
export { FrameParser, StreamError } from "./stream.js";
