"""What measures, compares and reports; nothing that trains, decodes or serves imports it."""
