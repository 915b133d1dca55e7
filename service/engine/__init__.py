"""The engine: its own process, continuous batching, sampling. The API side talks to it through `client`."""
