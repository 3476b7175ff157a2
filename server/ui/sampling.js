// The sampling values of the requests that the pages make.
import { hello } from "./store.js";

/** Penstock's own values, by name: only those that the model does not give. */
export const ownSampling = () => hello.value?.model.client_sampling ?? {};

/** The parameters of sampling, `{name, kind, default}`, in the order in which they are applied. */
export const parameters = () => hello.value?.sampling ?? [];

/** The cuts that a request uses, as `{name, label, value}`. */
export function cutsOf(params) {
  const found = [];
  for (const { name, kind, default: off } of parameters()) {
    const value = params?.[name] ?? hello.value?.defaults[name] ?? off;
    if (kind === "cut" && value !== off && value >= 0) found.push({ name, label: name.replaceAll("_", "-"), value });
  }
  return found;
}

/** `params` of a request with Penstock's own values for what neither the user nor the model gives. */
export const withSampling = (params) => ({ ...ownSampling(), ...params });
