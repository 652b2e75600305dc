async def post(url, payload, retries=3):
    return {"url": url, **payload}
