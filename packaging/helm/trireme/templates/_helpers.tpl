{{- define "trireme.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "trireme.selector" -}}
app.kubernetes.io/name: trireme
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "trireme.labels" -}}
{{ include "trireme.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "trireme.image" -}}
{{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) }}
{{- end -}}

{{/* Time from the removal of a pod until it is killed: preStop, requests in flight, and 15 s in which ranks end. */}}
{{- define "trireme.graceSeconds" -}}
{{ add .Values.preStopSeconds .Values.world.exitTimeoutSeconds 15 }}
{{- end -}}

{{- define "trireme.modelRepository" -}}
{{- if .Values.models.source }}{{ .Values.models.mountPath }}{{ else }}{{ .Values.world.modelRepository }}{{ end -}}
{{- end -}}

{{/* Flags of `launch`, but for the number of ranks and the hosts. A world that dies ends its container, which the kubelet starts again. */}}
{{- define "trireme.flags" -}}
- --model_repo={{ include "trireme.modelRepository" . }}
- --device={{ .Values.world.device }}
- --exit_timeout={{ .Values.world.exitTimeoutSeconds }}
- --exit-on-failure
{{- range .Values.world.launchFlags }}
- {{ . | quote }}
{{- end }}
{{- if or .Values.world.serverFlags .Values.apiKeys.secret }}
- --
{{- end }}
{{- if .Values.apiKeys.secret }}
- --api-key-file=/run/secrets/trireme/{{ .Values.apiKeys.key }}
{{- end }}
{{- range .Values.world.serverFlags }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{/* What every pod has: user, volumes, placement. */}}
{{- define "trireme.pod" -}}
terminationGracePeriodSeconds: {{ include "trireme.graceSeconds" . }}
{{- with .Values.serviceAccountName }}
serviceAccountName: {{ . }}
{{- end }}
automountServiceAccountToken: false
# Variables for each Service of the namespace would change the environment of the ranks.
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile:
    type: RuntimeDefault
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
volumes:
  - name: shm
    emptyDir:
      medium: Memory
      sizeLimit: {{ .Values.sharedMemory }}
  # The run directory, the cache of kernel measurements and downloaded models.
  - name: scratch
    emptyDir: {}
{{- with .Values.models.source }}
  - name: models
    {{- toYaml . | nindent 4 }}
{{- end }}
{{- with .Values.apiKeys.secret }}
  - name: api-keys
    secret:
      secretName: {{ . }}
{{- end }}
{{- if .Values.manyNodes.enabled }}
  - name: ssh
    secret:
      secretName: {{ .Values.manyNodes.sshSecret }}
      defaultMode: 0440
{{- end }}
{{- with .Values.extraVolumes }}
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* What every container has: image, rights, environment, devices, mounts. */}}
{{- define "trireme.container" -}}
image: {{ include "trireme.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- if or .Values.extraEnv .Values.hub.secret .Values.manyNodes.enabled }}
env:
{{- with .Values.hub.secret }}
  - name: HF_TOKEN
    valueFrom:
      secretKeyRef:
        name: {{ . }}
        key: token
{{- end }}
{{- if .Values.manyNodes.enabled }}
  # How `launch` and mpirun reach the other pods of the group.
  - name: OMPI_MCA_plm_rsh_agent
    value: ssh -p {{ .Values.manyNodes.sshPort }} -i /etc/trireme/ssh/id_ed25519 -o BatchMode=yes -o ConnectTimeout=10 -o StrictHostKeyChecking=accept-new -o UserKnownHostsFile=/run/trireme/known_hosts
{{- end }}
{{- with .Values.extraEnv }}
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
resources:
  {{- $resources := deepCopy .Values.resources }}
  {{- if ne .Values.world.device "cpu" }}
  {{- $resources = mergeOverwrite $resources (dict "limits" (dict .Values.gpu.resource .Values.world.ranksPerPod)) }}
  {{- end }}
  {{- toYaml $resources | nindent 2 }}
volumeMounts:
  - name: shm
    mountPath: /dev/shm
  - name: scratch
    mountPath: /tmp
    subPath: tmp
  - name: scratch
    mountPath: /run/trireme
    subPath: run
  - name: scratch
    mountPath: /var/cache/trireme
    subPath: cache
  - name: scratch
    mountPath: /var/lib/trireme
    subPath: lib
{{- if .Values.models.source }}
  - name: models
    mountPath: {{ .Values.models.mountPath }}
    readOnly: true
{{- end }}
{{- if .Values.apiKeys.secret }}
  - name: api-keys
    mountPath: /run/secrets/trireme
    readOnly: true
{{- end }}
{{- if .Values.manyNodes.enabled }}
  - name: ssh
    mountPath: /etc/trireme/ssh
    readOnly: true
{{- end }}
{{- with .Values.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Ports, probes and the drain of a container that serves. */}}
{{- define "trireme.server" -}}
ports:
  - name: http
    containerPort: 8000
  - name: grpc
    containerPort: 8001
  - name: metrics
    containerPort: 8002
# Until the models have loaded, the other probes wait.
startupProbe:
  httpGet:
    path: /v2/health/ready
    port: http
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: {{ div .Values.probes.startupSeconds 2 }}
# The process answers. `launch` itself ends a world that has not answered for 15 s; this probe is for what it misses.
livenessProbe:
  httpGet:
    path: /v2/health/live
    port: http
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
# Models can take requests now. False while workers of a model start again, and while a pod drains.
readinessProbe:
  {{- if eq .Values.probes.readiness "grpc" }}
  grpc:
    port: 8001
  {{- else }}
  httpGet:
    path: /v2/health/ready
    port: http
  {{- end }}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 2
lifecycle:
  preStop:
    exec:
      command: [sleep, "{{ .Values.preStopSeconds }}"]
{{- end -}}
