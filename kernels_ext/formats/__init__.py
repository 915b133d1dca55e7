"""Weight formats: a byte-level specification page each, and a slow obvious packer, unpacker and validator."""
