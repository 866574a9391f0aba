"""FlashAttentionScore and its gradient: softmax(scale q k^T) v, by blocks of rows, of the keys that they may see."""
