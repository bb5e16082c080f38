"""Files that hold tensors without data: a mark tells them from files with data."""

MARK = b"vramcast: a checkpoint of a virtual GPU, without data: "
