"""What an agent does on its own node: start the workers, watch them and the neighbour, end them."""
