"""A captured call as a folder that anybody can run: `write_repro`."""
