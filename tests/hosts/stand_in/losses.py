def get_loss_function(args):
    return {"policy_loss": policy_loss}[args.loss_type]


def policy_loss(x):
    return 2 * x
