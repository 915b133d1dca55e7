"""Weight formats: one byte-level specification page each, with a slow obvious packer, unpacker and validator."""
