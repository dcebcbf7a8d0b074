// Reads a JSON list of objects, writes a JSON list: for each null (no schema here), or a list of what its schema has against it.
import { existsSync, readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const PACKAGES = {
  "gateway.networking.k8s.io": "gateway-api",
  "networking.istio.io": "istio",
  "keda.sh": "keda",
  "monitoring.coreos.com": "prometheus-operator",
};
const folder = `${process.argv[2]}/node_modules/@kubernetes-models`;

async function judge(object) {
  const [group, version] = object.apiVersion.split("/");
  const path = `${folder}/${PACKAGES[group]}/${group}/${version}/${object.kind}.js`;
  if (!existsSync(path)) return null;
  const model = (await import(pathToFileURL(path)))[object.kind];
  try {
    new model(object).validate();
    return [];
  } catch (error) {
    return [error.message];
  }
}

const objects = JSON.parse(readFileSync(0, "utf8"));
const found = [];
for (const object of objects) found.push(await judge(object));
console.log(JSON.stringify(found));
