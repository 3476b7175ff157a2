// The sampling values of the requests that the pages make.
import { hello } from "./store.js";

/** Penstock's own values, by name: only those that the model does not give. */
export const ownSampling = () => hello.value?.model.client_sampling ?? {};

/** `params` of a request with Penstock's own values for what neither the user nor the model gives. */
export const withSampling = (params) => ({ ...ownSampling(), ...params });
