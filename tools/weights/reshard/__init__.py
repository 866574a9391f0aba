"""A checkpoint laid out anew, file by file: what each rank of another layout holds is cut from what is stored."""
