"""Packing: from a histogram of sizes to rows. It uses no examples, epochs or steps."""
