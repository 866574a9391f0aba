"""Two dumps compared, tensor by tensor."""
