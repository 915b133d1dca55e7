"""HTTP: routes, schemas, streaming. Imports no torch."""
