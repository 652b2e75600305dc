from .net import post


async def generate(args, sample):
    return await post(args.url, {"prompt": sample})
