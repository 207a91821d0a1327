# An image for the job files of `nsa-compile launch`: the package, and the C++ compiler that torch.compile needs on a CPU.
#
#   docker build --tag nsa-compile .
#   docker run --rm --volume "$PWD/runs:/work/runs" nsa-compile train
FROM python:3.12-slim
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir '.[train,plots,data,gpt2]' && rm -rf /src
WORKDIR /work
ENTRYPOINT ["nsa-compile"]
