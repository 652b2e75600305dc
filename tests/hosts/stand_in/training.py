from .losses import get_loss_function


def train(args, x):
    return get_loss_function(args)(x)
