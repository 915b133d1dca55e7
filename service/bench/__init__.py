"""`lacunar bench`: decoding speed, side by side with what else could serve the same weights."""
