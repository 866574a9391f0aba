"""A training step that has little in common with TeleChat's: compiled for MindSpore's passes, see `renew`.

    python tests/tools/fusion/training_graph.py FOLDER

An encoder layer with LayerNorm, softmax attention and GeLU behind a convolution, cross-entropy, Adam with weight decay.
"""

import os
import sys

import mindspore as ms
import numpy as np
from mindspore import nn, ops

WIDTH, HEADS, CLASSES = 32, 4, 10


class Layer(nn.Cell):
    """Attention and a feed-forward network, each behind a LayerNorm and beside a residual connection."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm((WIDTH,)), nn.LayerNorm((WIDTH,))
        self.query, self.key, self.value, self.out = (nn.Dense(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Dense(WIDTH, 4 * WIDTH), nn.Dense(4 * WIDTH, WIDTH)

    def construct(self, x):
        batch, length, _ = x.shape
        normal = self.first(x)
        query, key, value = (
            ops.transpose(cell(normal).reshape(batch, length, HEADS, -1), (0, 2, 1, 3))
            for cell in (self.query, self.key, self.value)
        )
        scores = ops.softmax(ops.matmul(query, key.swapaxes(-1, -2)) / (WIDTH // HEADS) ** 0.5, -1)
        mixed = ops.transpose(ops.matmul(scores, value), (0, 2, 1, 3)).reshape(batch, length, WIDTH)
        x = x + self.out(mixed)
        return x + self.down(ops.gelu(self.up(self.second(x))))


class Net(nn.Cell):
    """Patches of an image, two layers, a mean over patches, classes."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, stride=4, has_bias=True)
        self.layers = nn.SequentialCell(Layer(), Layer())
        self.scale = ms.Parameter(ms.Tensor(np.ones(WIDTH, np.float32)))
        self.head = nn.Dense(WIDTH, CLASSES)

    def construct(self, image):
        x = self.patches(image)
        x = ops.transpose(x.reshape(x.shape[0], WIDTH, -1), (0, 2, 1))
        x = ops.relu(self.layers(x) * self.scale) ** 2
        return self.head(ops.tanh(x.mean(1)) * ops.sigmoid(x.max(1)))


def main(folder):
    """Compile one step; the build of its kernels fails, as it must."""
    ms.set_context(mode=0, save_graphs=2, save_graphs_path=folder)
    ms.set_device("CPU")
    net = Net()
    loss = nn.WithLossCell(net, nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean"))
    step = nn.TrainOneStepCell(loss, nn.AdamWeightDecay(net.trainable_params(), 1e-3, weight_decay=0.1))
    images = ms.Tensor(np.ones((8, 3, 16, 16), np.float32))
    try:
        step(images, ms.Tensor(np.zeros(8, np.int32)))
    except RuntimeError as error:
        print(str(error)[:500], file=sys.stderr)
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
